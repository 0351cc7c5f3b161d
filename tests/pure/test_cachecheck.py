"""The statistics of `raycache cachecheck`, and how it judges servers whose noise is modelled."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from raycache.cachecheck.answers import Answer, Token, read_answer
from raycache.cachecheck.check import SCENARIOS, Options, Result, check
from raycache.cachecheck.client import Connection
from raycache.cachecheck.compare import difference
from raycache.cachecheck.floor import step_of
from raycache.cachecheck.noise import ALPHA, Noise, Rounds, binomial_tail, noise_of, noise_of_texts, t_quantile
from raycache.cachecheck.page import as_html
from raycache.cachecheck.pressure import Timing
from raycache.cachecheck.report import as_json, as_text
from raycache.cachecheck.target import Cold
from tests.oracle.noise_models import RIGHT, Model
from tests.oracle.noisy_server import NOISES, NoisyServer, Rounding

# --- distributions


@pytest.mark.parametrize(
    ("tail", "freedom", "value"),
    # Published tables; the last ones from the closed forms for 1 and 2 degrees of freedom.
    [
        (0.05, 10, 1.812),
        (0.01, 5, 3.365),
        (0.0005, 20, 3.850),
        (0.025, 100, 1.984),
        (1e-6, 1, 1 / math.tan(math.pi * 1e-6)),
        (1e-6, 2, (1 - 2e-6) * math.sqrt(2 / (1 - (1 - 2e-6) ** 2))),
    ],
)
def test_quantiles_of_students_t_are_those_of_tables(tail: float, freedom: int, value: float) -> None:
    assert t_quantile(tail, freedom) == pytest.approx(value, rel=5e-4)


def test_the_tail_of_a_binomial_distribution_is_the_sum_of_its_outcomes() -> None:
    assert binomial_tail(2, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(0, 9, 0.1) == pytest.approx(1)
    assert binomial_tail(3, 8, 0.01) == pytest.approx(5.4e-5, rel=0.05)


@pytest.mark.parametrize(("hits", "cold"), [(4, 3), (3, 5), (1, 1)])
def test_the_exceedance_test_counts_orders_of_two_groups(hits: int, cold: int) -> None:
    noise = noise_of({"a": [0.1] * 9}, looks=100, questions=[0.1] * cold)
    assert noise is not None
    orders = list(itertools.combinations(range(hits + cold), hits))  # the places of hits
    for above in range(hits + 1):
        largest = set(range(hits + cold)[hits + cold - above :])
        expected = sum(largest <= set(order) for order in orders) / len(orders)
        assert noise.chance_of(above, of=hits) == pytest.approx(expected)


# --- comparisons


def answer(*tokens: Token, **fields: Any) -> Answer:
    text = "".join(token.text for token in tokens)
    return Answer(
        **{"number": 1, "text": text, "tokens": tokens, "prompt_tokens": 50, "cached_tokens": 0}
        | fields
        | {"drafted_tokens": 0, "seconds": 0.0}
    )


def token(text: str, **top: float) -> Token:
    return Token(text, top[text], top)


def test_answers_are_as_far_apart_as_the_largest_change_of_a_log_probability() -> None:
    one = answer(token("a", a=-0.5, b=-1.5), token("c", c=-0.25, d=-2.0))
    other = answer(token("a", a=-0.5, b=-1.5), token("c", c=-0.25, d=-2.5))
    found = difference(one, other)
    assert (found.nats, found.position, found.diverged_at, found.compared) == (0.5, 1, None, 2)
    assert found.mean == 0.25


def test_a_tie_that_rounding_decides_is_a_small_difference() -> None:
    one = answer(token("a", a=-1.0, b=-1.001), token("x", x=-0.1))
    other = answer(token("b", b=-1.0, a=-1.001), token("y", y=-3.0))
    found = difference(one, other)
    assert found.nats == pytest.approx(0.001)
    assert (found.diverged_at, found.compared) == (0, 1)  # nothing behind it is compared


def test_another_token_that_was_not_close_is_a_large_difference() -> None:
    one = answer(token("a", a=-0.01, b=-5.0))
    assert difference(one, answer(token("b", b=-0.01, a=-5.0))).nats == pytest.approx(4.99)
    # The rival is not shown: it is at most as likely as the last that is.
    assert difference(one, answer(token("z", z=-0.01, y=-6.0))).nats == pytest.approx((4.99 + 5.99) / 2)


def test_where_the_model_is_sure_rounding_shows_in_unlikely_tokens() -> None:
    one, other = (answer(token("a", a=-0.0001, b=least)) for least in (-9.0, -9.0625))
    assert difference(one, other).nats == pytest.approx(0.0625)


def test_tokens_that_cannot_be_are_not_compared() -> None:
    one, other = (answer(token("a", a=-0.1, b=least)) for least in (-9999.0, -30.0))
    assert difference(one, other).nats == 0


def test_without_log_probabilities_only_texts_are_compared() -> None:
    one, other = (answer(text=text) for text in ("the falcon", "the heron"))
    assert difference(one, other).diverged_at == 4 and difference(one, other).nats is None
    assert difference(one, one).diverged_at is None


def test_parts_of_characters_share_a_text_and_are_told_apart_by_their_bytes() -> None:
    entry = {"token": "�", "logprob": -0.5, "bytes": [0xE6]}
    tops = [entry, {"token": "�", "logprob": -1.5, "bytes": [0x9D]}]
    value = {
        "choices": [{"message": {"content": "x"}, "logprobs": {"content": [{**entry, "top_logprobs": tops}]}}],
        "usage": None,
    }
    (found,) = read_answer(value, number=1, seconds=0).tokens
    assert found.top == {"bytes:e6": -0.5, "bytes:9d": -1.5}
    completion = {"tokens": ["�"], "token_logprobs": [-0.5], "top_logprobs": [{"�": -1.5, "a": -2.0}]}
    (found,) = read_answer({"choices": [{"text": "x", "logprobs": completion}]}, number=1, seconds=0).tokens
    assert found.top == {"�": -0.5, "a": -2.0}


@pytest.mark.parametrize("value", [{}, {"choices": []}, {"choices": [{"message": None}]}, {"error": "x"}])
def test_what_is_no_answer_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no answer of the OpenAI API"):
        read_answer(value, number=1, seconds=0)


# --- thresholds


def false_alarms(noise: Noise, changes: list[float]) -> bool:
    rounds = Rounds()
    return any(noise.is_gross(nats) or rounds.add([nats > noise.some], noise=noise) for nats in changes)


@pytest.mark.parametrize("tail", ["normal", "exponential", "log-normal", "steps"])
def test_a_right_server_is_called_faulty_in_less_than_one_of_a_thousand_runs(tail: str) -> None:
    """4,000 runs of 10 comparisons, of which hits have 1.5 times the noise that was measured: at most one alarm, which
    a rate of 1 in 1,000 would pass with a probability of 9 %."""
    draw = random.Random(7)

    def change(size: float) -> float:
        match tail:
            case "normal":
                return size * max(abs(draw.gauss(0, 1)) for _ in range(8))
            case "exponential":
                return size * max(draw.expovariate(1) for _ in range(16))
            case "steps":
                return 0.125 * round(8 * size * max(abs(draw.gauss(0, 1)) for _ in range(8)))
            case _:
                return size * math.exp(draw.gauss(0, 0.5))

    alarms = 0
    for _ in range(4000):
        samples = {"alone": [0.0] * 8, "in batches": [change(0.05) for _ in range(12)]}
        noise = noise_of(samples, looks=150)
        assert noise is not None
        alarms += false_alarms(noise, [change(0.075) for _ in range(10)]) if noise.is_usable else 0
    assert alarms <= 1


def test_questions_whose_answers_are_all_noisy_are_no_fault() -> None:
    """As above, 1,500 runs of four rounds of nine scenarios; each question has a noise of its own."""
    draw = random.Random(7)
    comparisons = (2, 4, 4, 2, 5, 2, 4, 1, 2)

    def change() -> float:
        return 0.05 * math.exp(draw.gauss(0, 0.8))

    alarms = 0
    for _ in range(1500):
        noise = noise_of({kind: [change() for _ in range(6)] for kind in ("in other pieces", "in batches")}, looks=300)
        assert noise is not None
        rounds: defaultdict[int | str, Rounds] = defaultdict(Rounds)
        found = [(name, count, change()) for _ in range(4) for name, count in enumerate(comparisons)]
        alarms += any(
            noise.is_gross(nats) or rounds[key].add([nats > noise.some] * count, noise=noise)
            for name, count, nats in found
            for key in (name, "all")
        )
    assert alarms <= 1


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_server_passes_all_tests_together(name: str) -> None:
    """A few runs; `python -m benchmarks.cachecheck simulated` makes enough to say how rare false alarms are."""
    draw = random.Random(7)
    for rounds in (12, 24):
        assert not any(RIGHT[name].run(draw, rounds=rounds) for _ in range(200))


def test_a_small_shift_of_all_hits_is_no_fault_if_it_changes_few_texts() -> None:
    """Five times the noise, which a rank test alone would take for a fault."""
    draw = random.Random(7)
    model = Model(nats=0.01, shift=0.05, differ=0.4)
    assert not any(fault.test == "typical" for _ in range(200) for fault in model.run(draw))
    assert any(fault.test == "typical" for _ in range(9) for fault in replace(model, differ=math.inf).run(draw))


@pytest.mark.parametrize(("fault", "rounds", "share"), [(3.0, 12, 0.5), (3.0, 24, 0.8), (8.0, 12, 0.95)])
def test_faults_are_found_in_large_noise(fault: float, rounds: int, share: float) -> None:
    """Changes of up to so many nats, where a gross one would have to be above ten."""
    draw = random.Random(7)
    model = Model("normal", fault=fault, differ=1)
    assert sum(bool(model.run(draw, rounds=rounds)) for _ in range(200)) >= 200 * share


def test_thresholds_follow_the_noise() -> None:
    quiet, loud = (noise_of({"a": [size] * 10, "b": [0.0] * 10}, looks=100) for size in (0.001, 0.1))
    assert quiet is not None and loud is not None
    assert loud.some == pytest.approx(100 * quiet.some) and loud.gross == pytest.approx(100 * quiet.gross)
    assert quiet.some < quiet.gross < 0.1 < loud.some
    assert quiet.is_gross(0.2) and not loud.is_gross(0.2)


def test_answers_without_any_change_do_not_widen_the_thresholds() -> None:
    changes = [0.37, 0.39, 0.32, 0.41]
    some, more = (noise_of({"in batches": [*changes, *[0.0] * zeros], "b": [0.1] * 6}, looks=100) for zeros in (0, 4))
    assert some is not None and more is not None
    assert more.gross == pytest.approx(some.gross) and more.some == pytest.approx(some.some)


def test_without_noise_differences_below_the_resolution_are_no_fault() -> None:
    noise = noise_of({"a": [0.0] * 20}, looks=400)
    assert noise is not None
    assert not noise.is_gross(1e-4) and noise.some > 1e-4
    assert noise.is_gross(0.01)


def test_texts_alone_need_many_differences() -> None:
    noise = noise_of_texts([None] * 20, looks=100)
    assert noise is not None and noise.characters is None
    # (1 - chance) ** 20 = ALPHA / 8, the limit of Clopper and Pearson without a success, for each of four lengths
    assert noise.chance == pytest.approx(1 - (ALPHA / 8) ** (1 / 20), rel=1e-6)
    assert not noise.is_repeated(exceeded=5, of=5) and noise.is_repeated(exceeded=13, of=13)


def test_of_texts_that_part_late_the_beginnings_are_compared() -> None:
    noise = noise_of_texts([13, 30, None, 60, 14, *[None] * 11], looks=100)
    assert noise is not None and noise.characters == 12 and sum(noise.samples["texts that differ"]) == 0
    assert noise.is_over(nats=None, place=11)
    assert not noise.is_over(nats=None, place=12) and not noise.is_over(nats=None, place=None)


def test_too_few_samples_are_no_noise_floor() -> None:
    assert noise_of({"a": [0.1] * 5}, looks=100) is None
    assert noise_of_texts([None] * 5, looks=100) is None


# --- whole runs against modelled noise


def run(server: NoisyServer, **options: Any) -> Result:
    settings = {"budget": 150, "prompt_tokens": 80, "output_tokens": 8, **options}
    connection = Connection("http://test/v1/", transport=server, clock=lambda: 0.0)
    return asyncio.run(check(connection, Options(**settings)))


@pytest.mark.parametrize("noise", list(NOISES))
def test_noise_is_not_called_a_fault(noise: str) -> None:
    for seed in range(3):
        result = run(NoisyServer(seed, noise=noise, batched=0.04, cached=0.06), seed=seed)
        assert result.exit_code == 0, as_text(result)


def test_the_steps_of_bfloat16_are_not_called_a_fault() -> None:
    results = [run(NoisyServer(seed, rounding=Rounding(0.0625)), seed=seed) for seed in range(3)]
    assert all(result.exit_code == 0 for result in results), [as_text(result) for result in results]
    assert any(one.difference.diverged_at is not None for result in results for one in result.comparisons)


@pytest.mark.parametrize("decimals", [3, 4, 17])
def test_a_rare_step_of_rounded_logits_is_not_called_a_fault(decimals: int) -> None:
    """Few cold answers change at all, and hits by one step, a hundred times what counts for exact logits."""
    servers = [NoisyServer(seed, batched=4e-5, cached=2e-4, rounding=Rounding(0.03125, decimals)) for seed in range(6)]
    results = [run(server, seed=seed) for seed, server in enumerate(servers)]
    assert all(result.exit_code == 0 for result in results), [as_text(result) for result in results]
    noises = [result.noise for result in results if result.noise is not None]
    assert len(noises) == 6 and {noise.step for noise in noises} == {0.03125}
    assert any(max(map(max, noise.samples.values())) == 0 for noise in noises), "cold answers changed in every run"
    assert any((one.difference.nats or 0) > 0.01 for result in results for one in result.comparisons)
    assert "lie multiples of 0.03125 nats apart" in as_text(results[0])


def test_what_a_server_shows_with_two_decimals_is_not_called_a_fault() -> None:
    for seed in range(6):
        result = run(NoisyServer(seed, batched=2e-6, cached=2e-5, rounding=Rounding(decimals=2)), seed=seed)
        assert result.exit_code == 0, as_text(result)


@pytest.mark.parametrize(("step", "shift"), [(0.03125, 0.5), (0.125, 1.25)])
def test_a_fault_of_some_steps_is_found_where_cold_answers_do_not_change(step: float, shift: float) -> None:
    result = run(NoisyServer(1, rounding=Rounding(step), batched=0.0, cached=0.0, shift=shift), stops=True)
    assert result.exit_code == 1, as_text(result)


def shown(logits: list[float], *, decimals: int) -> Token:
    """A token with its log-probability and those of the others."""
    total = math.log(sum(map(math.exp, logits)))
    top = {str(i): round(logit - total, decimals) for i, logit in enumerate(logits)}
    return Token("0", top["0"], top)


def an_answer(tokens: list[Token]) -> Answer:
    return Answer(1, "", tuple(tokens), prompt_tokens=None, cached_tokens=None, drafted_tokens=0, seconds=0.0)


@pytest.mark.parametrize("decimals", [3, 4, 6, 17])
@pytest.mark.parametrize("step", [2**-1, 2**-3, 2**-5, 2**-7])
def test_the_step_of_logits_is_read_from_log_probabilities(step: float, decimals: int) -> None:
    """Large logits have twice the step of small ones."""
    draw = random.Random(3)

    def of(rounding: float, noise: float = 0.0) -> Answer:
        logits = [round(draw.gauss(10, 4) / rounding) * rounding + noise * draw.random() for _ in range(45)]
        return an_answer([shown(logits[at : at + 5], decimals=decimals) for at in range(0, 45, 5)])

    exact = 0.001 if decimals == 3 else 0.0
    assert step_of([of(step), of(2 * step)]) == step
    assert step_of([of(step, noise=0.02 * step + 0.002)]) == exact
    assert step_of([of(2**-20)]) == exact


def test_no_step_is_read_from_few_gaps_and_from_what_is_no_log_probability() -> None:
    assert step_of([]) == 0.0
    fixed = Token("a", -0.5, {"a": -0.5, "b": -1.5})
    assert step_of([an_answer([fixed] * 64)]) == 0.1  # what it shows has one decimal
    draw, others = random.Random(3), itertools.cycle([-9999.0, -math.inf])
    for step, found in ((0.125, 0.125), (2**-20, 0.0)):
        logits = [round(draw.gauss(10, 4) / step) * step for _ in range(100)]
        tokens = [shown(logits[at : at + 5], decimals=6) for at in range(0, 100, 5)]
        tokens = [replace(token, top={**token.top, "?": next(others)}) for token in tokens]
        assert step_of([an_answer(tokens)]) == found


@pytest.mark.parametrize(("shift", "share"), [(0.8, 1.0), (5.0, 0.1)])
def test_a_fault_above_the_noise_is_found(shift: float, share: float) -> None:
    result = run(NoisyServer(1, shift=shift, share=share), stops=True)
    assert result.exit_code == 1 and result.requests < 150
    assert result.faults[0].test == ("repeated" if share == 1 else "gross")


def test_a_fault_below_what_noise_explains_is_found_by_most_hits_together() -> None:
    for shift, code in ((0.0, 0), (1.5, 1)):
        result = run(NoisyServer(1, batched=0.1, cached=0.1, shift=shift), seed=1)
        assert result.exit_code == code, as_text(result)
    assert [(fault.scenario, fault.test) for fault in result.faults] == [("all scenarios", "typical")]
    assert result.noise is not None and result.noise.gross > 10


def test_a_server_noisier_than_any_fault_cannot_be_tested() -> None:
    result = run(NoisyServer(1, alone=2.0, batched=2.0))
    assert result.exit_code == 2 and "differ among themselves" in result.untested


# --- time


def test_claimed_hits_are_refuted_only_if_none_was_faster_and_computing_takes_long() -> None:
    short, cold = (0.1,) * 6, (1.0, 1.1, 0.9, 1.0, 1.2, 1.0)
    assert Timing(short, cold, (0.2,) * 6).can_tell and not Timing(short, cold, (0.2,) * 6).is_refuted
    assert Timing(short, cold, (0.9,) * 6).is_refuted
    assert not Timing(short, cold, (0.9,) * 5 + (0.3,)).is_refuted  # one was faster
    assert not Timing((0.1,) * 5 + (0.6,), cold, (0.9,) * 6).can_tell  # the machine was busy
    assert not Timing(short, cold, (0.9,) * 3).is_refuted  # too few


# --- reports


class Page(HTMLParser):
    """What a page contains."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_all_reports_say_the_same() -> None:
    result = run(NoisyServer(1, shift=0.8), stops=True, model="<b>&")
    text, page = as_text(result), as_html(result)
    value = json.loads(json.dumps(as_json(result), allow_nan=False))
    fault = value["faults"][0]
    assert (value["exit_code"], fault["test"]) == (1, "repeated")
    assert f"found after {fault['requests']} requests" in text and f"found after {fault['requests']} requests" in page
    assert "less than 1 of 1,000 runs" in text and "less than 1 of 1,000 runs" in page
    assert set(value["scenarios"]) == set(SCENARIOS)
    parsed = Page(page)
    assert parsed.links == [] and not {"script", "link", "img", "b"} & set(parsed.tags)
    dots = [one for one in value["comparisons"] if one["nats"] is not None]
    assert parsed.tags.count("circle") == len(dots) > 0
    assert "&lt;b&gt;&amp;" in page


def test_a_result_without_any_answer_can_be_reported() -> None:
    result = Result("http://x", Options(cold=Cold.LINE), untested="no answer")
    assert "could not be tested: no answer" in as_text(result) and "no answer" in as_html(result)
    assert as_json(result)["exit_code"] == 2


def test_neither_torch_nor_ray_nor_anything_but_httpx_is_needed() -> None:
    """As after `pip install --no-deps raycache` and `pip install httpx2`: all else is blocked."""
    code = """
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                top = name.partition(".")[0]
                allowed = {"raycache", "launch", "httpx2", "httpcore2", "h11", "anyio", "idna", "certifi", "sniffio",
                           "truststore", "typing_extensions", "_distutils_hack", "sitecustomize", "usercustomize"}
                if top not in allowed and top not in sys.stdlib_module_names:
                    raise ModuleNotFoundError(f"blocked: {name}", name=name)

        sys.meta_path.insert(0, Blocked())
        from launch.cli.main import main
        sys.exit(main(["cachecheck", "http://127.0.0.1:9", "--timeout-s", "5"]))
    """
    code = re.sub(r"^ {8}", "", code, flags=re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, ""), done.stderr
    assert "does not respond" in done.stdout
