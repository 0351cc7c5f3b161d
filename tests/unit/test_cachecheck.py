"""`raycache cachecheck` against a small real server, right and with faults planted in its cache."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from launch.cli import cachecheck
from launch.cli.main import main
from raycache.cachecheck.check import MIN_BUDGET, SCENARIOS, Options, Result, check
from raycache.cachecheck.client import Connection
from raycache.cachecheck.report import as_json, as_text
from raycache.cachecheck.target import Cold
from tests.oracle.cached_server import CachedServer, Planted

SMALL = 100
"""Pages of a cache that long prompts fill."""


def run(server: CachedServer, **options: Any) -> Result:
    settings = {"budget": 400, "prompt_tokens": 60, "output_tokens": 6, **options}
    transport = httpx2.ASGITransport(server.app)
    connection = Connection("http://127.0.0.1", transport=transport, clock=server.clock)
    return asyncio.run(check(connection, Options(**settings)))


@pytest.mark.parametrize(
    ("cold", "pages"), [(None, 4000), (None, SMALL), pytest.param(Cold.FLUSH, 4000, marks=pytest.mark.long)]
)
def test_a_right_server_is_right(cold: Cold | None, pages: int) -> None:
    result = run(CachedServer(pages=pages), cold=cold, seed=pages, budget=160)
    assert result.exit_code == 0, as_text(result)
    rows = as_json(result)["scenarios"]
    skipped = {"drafts"} | ({"tenants"} if cold else set())
    assert {name for name in SCENARIOS if not rows[name]["comparisons"]} == skipped
    assert all(rows[name]["hits"] for name in SCENARIOS if name not in skipped | {"evicted"})
    assert result.requests == 160
    assert "facts recalled from " in as_text(result)


@pytest.mark.parametrize(
    ("fault", "scenarios"),
    [
        (Planted.STALE_PAGE, {"evicted"}),
        (Planted.OTHER_RESTORE_POINT, {"branched"}),
        (Planted.WINDOW_OFF_BY_ONE, {"repeated"}),
        (Planted.WRONG_POSITION, {"repeated"}),
        (Planted.DROPPED_TOOLS, {"tools"}),
        (Planted.OTHER_TENANT, {"tenants"}),
        (Planted.CLAIMS_COMPUTED, {"usage"}),
        (Planted.CLAIMS_TOO_MANY, {"branched"}),
        (Planted.LATER_TOKENS, {"repeated"}),
        (Planted.ONE_IN_FIFTY, set(SCENARIOS)),
        (Planted.UNDER_LOAD, {"load"}),
    ],
)
def test_a_planted_fault_is_found(fault: Planted, scenarios: set[str]) -> None:
    result = run(CachedServer(fault, pages=SMALL if fault is Planted.STALE_PAGE else 4000), stops=True)
    assert result.exit_code == 1, as_text(result)
    print(f"{fault}: {result.faults[0].scenario} ({result.faults[0].test}), {result.faults[0].number} requests")
    assert {found.scenario for found in result.faults} <= scenarios
    assert result.faults[0].number < 250


def test_a_claimed_hit_that_was_computed_is_found_by_nothing_but_time() -> None:
    server = CachedServer(Planted.CLAIMS_COMPUTED)
    stopped = httpx2.ASGITransport(server.app)
    options = Options(budget=150, prompt_tokens=60, output_tokens=6)
    result = asyncio.run(check(Connection("http://127.0.0.1", transport=stopped, clock=lambda: 0.0), options))
    assert result.exit_code == 0 and result.timing is not None
    assert "too close to that of short prompts to tell" in result.timing.text


@pytest.mark.parametrize(
    ("missing", "told", "fault"),
    [
        ("has_logprobs", "no log-probabilities", Planted.WRONG_POSITION),
        ("has_usage", "does not tell how many tokens were cached", Planted.WRONG_POSITION),
        # Nothing shows how this server rounds: it computes one chat at a time, each in one piece.
        ("has_completions", "changes of 0.25 nats are assumed", Planted.OTHER_TENANT),
    ],
)
def test_servers_that_show_less_can_be_tested(missing: str, told: str, fault: Planted) -> None:
    result = run(CachedServer(**{missing: False}), budget=120)
    assert result.exit_code == 0 and told in as_text(result), as_text(result)
    # Where only texts are compared, many must differ.
    faulty = run(CachedServer(fault, **{missing: False}), budget=400, stops=True)
    assert faulty.exit_code == 1, as_text(faulty)


def test_without_salts_first_lines_are_too_noisy_for_this_model_and_flushes_are_not() -> None:
    result = run(CachedServer(cold_field=""), budget=150)
    assert result.exit_code == 2 and "try --cold flush" in as_text(result)
    result = run(CachedServer(Planted.WRONG_POSITION, cold_field=""), cold=Cold.FLUSH, stops=True)
    assert result.exit_code == 1


def test_where_requests_can_turn_the_cache_off_they_do() -> None:
    result = run(CachedServer(cold_field="cache_prompt"), budget=160)
    assert result.exit_code == 0 and result.target is not None and result.target.cold is Cold.OFF, as_text(result)
    rows = as_json(result)["scenarios"]
    assert {name for name in SCENARIOS if not rows[name]["hits"]} == {"tenants", "drafts"}
    faulty = run(CachedServer(Planted.WRONG_POSITION, cold_field="cache_prompt"), stops=True)
    assert [fault.scenario for fault in faulty.faults] == ["repeated"]
    result = run(CachedServer(cold_field=""), cold=Cold.OFF, budget=100)
    assert result.exit_code == 2 and "try --cold line" in as_text(result)


def test_prompts_fit_into_the_context_of_a_slot() -> None:
    server = CachedServer(cold_field="cache_prompt")
    server.listed = {"meta": {"n_ctx": 1200}}
    result = run(server, prompt_tokens=600, budget=100)
    assert result.target is not None and result.target.context == 1200
    lengths = [one.observed.prompt_tokens or 0 for one in result.comparisons]
    assert 100 < max(lengths) < 1200 and not result.refused


def test_a_server_that_is_loading_its_model_is_asked_again() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    for loading, code in ((2, 0), (9, 2)):
        server = CachedServer()
        server.loading = loading
        connection = Connection(
            "http://127.0.0.1", transport=httpx2.ASGITransport(server.app), clock=server.clock, sleep=sleep
        )
        result = asyncio.run(check(connection, Options(budget=150, prompt_tokens=60, output_tokens=6)))
        assert result.exit_code == code, as_text(result)
    assert "503: Loading model" in result.untested and waited == [1, 2, 1, 2, 4, 8]


def test_a_scenario_that_the_budget_left_out_says_so() -> None:
    assert "skipped: no requests were left" in as_text(run(CachedServer(), budget=100))


def test_salts_that_are_promised_and_not_honoured_are_a_fault() -> None:
    # The server refuses unknown fields but takes cache_salt, so it knows the field.
    result = run(CachedServer(honours_salts=False), budget=150)
    assert result.exit_code == 1 and [fault.scenario for fault in result.faults] == ["tenants"]
    # Unless the user knows that it promises nothing.
    assert run(CachedServer(honours_salts=False), cold=Cold.FLUSH, has_salts=False, budget=150).exit_code == 0


def test_the_command_knows_the_scenarios_before_it_imports_them() -> None:
    assert tuple(SCENARIOS) == cachecheck.SCENARIOS and cachecheck.MIN_BUDGET == MIN_BUDGET


def test_what_a_server_says_does_not_reach_the_terminal_raw() -> None:
    result = run(CachedServer(model="\x1b[31mred"), budget=100)
    assert "?[31mred" in as_text(result) and "\x1b" not in as_text(result)


def test_the_command_says_what_is_wrong_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        (["localhost:8000"], "http://HOST:PORT"),
        (["http://localhost:9", "--budget-requests", "5"], "at least 100"),
        (["http://localhost:9", "--prompt-tokens", "0"], "at least 1"),
    ):
        assert main(["cachecheck", *flags]) == 2
        assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_could_not_be_tested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cachecheck", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9 does not respond" in capsys.readouterr().out
