"""GET /history: what the server remembers of the series that /ui plots."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.http.history import _MOST_TENANTS, INTERVAL_S, NUM_SAMPLES, History
from raycache.api.tokenizer import Tokenizer
from raycache.divergence.cause import Cause
from raycache.errors import EngineStoppedError
from raycache.types import Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_FIGURES = (7, 1, 0, 100, 50)
_Lost = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


async def asked(client: httpx.AsyncClient, *, key: str = "") -> list[dict[str, Any]]:
    answer = await client.get("/history", headers={"Authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["samples"]
    return found


def test_ten_minutes_are_kept() -> None:
    assert NUM_SAMPLES * INTERVAL_S == 600


@given(
    steps=st.lists(
        st.dictionaries(
            st.tuples(st.sampled_from(["alice", "bob", "carol"]), st.sampled_from(["volatile", "capacity"])),
            st.integers(0, 1000),
        ),
        max_size=2 * NUM_SAMPLES,
    )
)
def test_the_samples_add_up_to_what_was_lost_while_they_were_taken(steps: list[dict[tuple[str, str], int]]) -> None:
    counts: _Lost = {}
    history = History(lambda: {tenant: dict(causes) for tenant, causes in counts.items()})
    for number, step in enumerate(steps):
        for (tenant, cause), tokens in step.items():
            causes = counts.setdefault(tenant, {})
            causes[cause] = causes.get(cause, 0) + tokens
        history.sample((number, *_FIGURES[1:]), now_s=float(number))
    assert [sample.figures[0] for sample in history.samples] == list(range(len(steps)))[-NUM_SAMPLES:]
    for sample, step in zip(history.samples, steps[-NUM_SAMPLES:], strict=True):
        wanted: dict[str, int] = {}
        for (_, cause), tokens in step.items():
            wanted[cause] = wanted.get(cause, 0) + tokens
        assert sample.lost == {cause: tokens for cause, tokens in wanted.items() if tokens}
        by_tenant = {tenant: sum(causes.values()) for tenant, causes in sample.tenants.items()}
        assert sum(by_tenant.values()) == sum(wanted.values()) and 0 not in by_tenant.values()


def _bytes_of(value: Any) -> int:
    """Of an object and all that it alone holds."""
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [*value.values()]
    elif isinstance(value, tuple | list):
        inside = list(value)
    return sys.getsizeof(value) + sum(map(_bytes_of, inside))


def test_its_memory_is_bounded_however_many_tenants_and_causes_there_are() -> None:
    counts: _Lost = {f"tenant {n}": {cause: n for cause in Cause} for n in range(256)}
    history = History(lambda: {tenant: dict(causes) for tenant, causes in counts.items()})
    sizes = []
    for number in range(3 * NUM_SAMPLES):
        for name, causes in counts.items():
            for cause in causes:
                causes[cause] += 1 + int(name.split()[1])
        history.sample(_FIGURES, now_s=float(number))
        if number + 1 in (NUM_SAMPLES, 3 * NUM_SAMPLES):
            sizes.append(sum(_bytes_of([each.at_s, each.figures, each.lost, each.tenants]) for each in history.samples))
    assert sizes[0] == sizes[1] < 8 * 2**20
    last = history.samples[-1]
    assert set(last.tenants) == {f"tenant {n}" for n in range(256 - _MOST_TENANTS, 256)}  # those that lost most
    assert last.lost == {cause: sum(range(1, 257)) for cause in Cause}  # of all


def test_a_page_opened_late_gets_what_was_before(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.http.history.INTERVAL_S", 0.005)

    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer)
        engine.reuse = {"cached_tokens": 0, "miss": Miss.EVICTED_DEVICE}
        body = {"model": "tiny", "prompt": "a long text that fills some pages, as all do here" * 2, "max_tokens": 1}
        async with over_asgi(engine, tokenizer) as client:
            for number in (1, 2, 3):
                engine.figures = {"waiting": number, "prompt_tokens": 100 * number, "cached_tokens": 30 * number}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                await asyncio.sleep(0.05)
            samples = await asked(client)
            schema = (await client.get("/openapi.json")).json()
            whole = (await client.get("/history")).json()
            jsonschema.validate(whole, {**schema["components"]["schemas"]["History"], **schema})
            engine.refusal = EngineStoppedError("recovering")
            during = await asked(client)
            engine.refusal = None
        assert {sample["waiting"] for sample in samples} >= {1, 2, 3}
        ages = [sample["age_s"] for sample in samples]
        assert ages == sorted(ages, reverse=True) and ages[-1] == 0
        assert samples[-1]["prompt_tokens"] == 300 and samples[-1]["cached_tokens"] == 90
        lost = [sum(sample["lost_tokens"].values()) for sample in samples]
        assert sum(lost) > 0 and {cause for sample in samples for cause in sample["lost_tokens"]} == {"capacity"}
        assert len(during) >= 3 and during[0]["waiting"] == 1  # those that there are

    run(scenario())


def test_a_tenant_sees_what_its_own_prompts_lost(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob", "operator")}
    keys.write_text("\n".join(f"{name} {digest}" for name, digest in digests.items()) + " admin\n")
    keys.chmod(0o600)

    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer)
        engine.reuse = {"cached_tokens": 0, "miss": Miss.EVICTED_DEVICE}
        body = {"model": "tiny", "prompt": "a long text that fills some pages, as all do here" * 2, "max_tokens": 1}
        async with over_asgi(engine, tokenizer, api_keys=str(keys)) as client:
            for _ in range(2):
                headers = {"Authorization": "Bearer alice"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            seen = {key: (await asked(client, key=key))[-1] for key in digests}
            assert (await client.get("/history")).status_code == 401
        assert seen["alice"].keys() == seen["bob"].keys() == {"age_s", "lost_tokens"}
        assert seen["bob"]["lost_tokens"] == {} != seen["alice"]["lost_tokens"]
        assert seen["operator"]["lost_tokens"] == seen["alice"]["lost_tokens"]
        assert {"running", "waiting", "steps", "prompt_tokens", "cached_tokens"} <= seen["operator"].keys()

    run(scenario())
