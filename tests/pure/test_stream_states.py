"""Where the decider says that a request is."""

from __future__ import annotations

from raycache.types import GenerateRequest, SamplingParams, StreamPhase
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin_storage import StorageTrouble
from tests.pure.test_scheduler import make_engine


def request(name: str, prompt: list[int], *, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens))


def test_requests_wait_run_and_are_preempted() -> None:
    engine, _ = make_engine(num_pages=8, page_size=2, max_running=2, max_step_tokens=4)
    for number, name in enumerate(("first", "second", "third")):
        engine.add(request(name, [1 + number] * 6, max_tokens=8))
    names = ["first", "second", "third", "unknown"]
    states = engine.stream_states(names)
    assert {name: state.phase for name, state in states.items()} == dict.fromkeys(names[:3], StreamPhase.WAITING)
    assert all((state.computed_tokens, state.output_tokens) == (0, 0) for state in states.values())
    engine.step()
    first = engine.stream_states(names)["first"]
    assert (first.phase, first.computed_tokens, first.output_tokens) == (StreamPhase.RUNNING, 4, 0)
    seen: dict[str, list[StreamPhase]] = {name: [] for name in names}
    num_output: dict[str, int] = {}
    while engine.has_work:
        for output in engine.step():
            num_output[output.request_id] = num_output.get(output.request_id, 0) + len(output.token_ids)
        for name, state in engine.stream_states(names).items():
            assert state.output_tokens == num_output.get(name, 0)
            if seen[name][-1:] != [state.phase]:
                seen[name].append(state.phase)
    running, preempted = StreamPhase.RUNNING, StreamPhase.PREEMPTED
    assert engine.stats().preemptions > 0 and engine.stream_states(names) == {}
    assert seen["first"] == [running]
    assert [running, preempted, running] == seen["second"][-3:]
    assert seen["third"][:2] == [StreamPhase.WAITING, running] and seen["unknown"] == []


def test_a_request_that_continues_after_its_engine_was_lost_counts_as_preempted() -> None:
    engine, _ = make_engine()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
    engine.add(GenerateRequest("r", [1, 2, 3], sampling, output=[4]))
    state = engine.stream_states(["r"])["r"]
    assert (state.phase, state.output_tokens) == (StreamPhase.PREEMPTED, 1)


def test_a_prefix_that_comes_from_storage_or_host_is_loading() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    tiers = Tiered(Setup(has_storage=True, storage_trouble=StorageTrouble(most_ticks=4)))
    tiers.ask(prompt)
    for forgotten, tier in ((("device",), "host"), (("device", "host"), "storage")):
        tiers.forget(*forgotten)
        tiers.engine.add(request("again", prompt, max_tokens=2))
        phases, by_tier = [], {}
        while tiers.engine.has_requests:
            tiers.engine.step()
            for state in tiers.engine.stream_states(["again"]).values():
                by_tier = state.cached_by_tier
                if phases[-1:] != [state.phase]:
                    phases.append(state.phase)
        assert by_tier == {tier: 8}
        assert phases[-1] is StreamPhase.RUNNING
        if tier == "storage":
            assert phases == [StreamPhase.LOADING, StreamPhase.RUNNING]
        tiers.settle()
