"""The whole test: probe the server, measure its noise, run scenarios until the budget is spent, and judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycache.cachecheck import pressure, scenarios
from raycache.cachecheck.client import BudgetSpentError, CannotTestError, Client, Connection, RefusedError
from raycache.cachecheck.floor import measure
from raycache.cachecheck.judge import Fault, Judge
from raycache.cachecheck.lab import Comparison, Lab, Scenario, Violation
from raycache.cachecheck.noise import Noise
from raycache.cachecheck.target import Cold, Probe, Target
from raycache.cachecheck.text import Writer

SCENARIOS: Mapping[str, Scenario] = {
    "repeated": scenarios.repeated,
    "branched": scenarios.branched,
    "grown": scenarios.grown,
    "tenants": scenarios.tenants,
    "tools": scenarios.tools,
    "cut": scenarios.cut,
    "drafts": scenarios.drafts,
    "load": pressure.load,
    "needle": pressure.needle,
    "evicted": pressure.evicted,
}
"""In the order in which they are run."""

MIN_BUDGET = 100
"""Requests that probe, noise floor and one round need."""

_MIN_HITS = 10


@dataclass(frozen=True)
class Options:
    """What is tested.

    Attributes:
        model: empty: the first that the server lists.
        seed: of all prompts.
        budget: most requests that generate tokens.
        prompt_tokens: of a usual prompt; the longest have about six times as many.
        output_tokens: of each answer.
        cold: None: salts if they work, else a first line of its own.
        has_salts: whether `cache_salt` must be honoured; None: if the server shows that it knows the field.
        only: names of scenarios; empty: all.
        stops: whether the first fault ends the run.
    """

    model: str = ""
    seed: int = 0
    budget: int = 400
    prompt_tokens: int = 600
    output_tokens: int = 16
    cold: Cold | None = None
    has_salts: bool | None = None
    only: tuple[str, ...] = ()
    stops: bool = False


@dataclass
class Result:
    """Everything that was found.

    Attributes:
        noise: None: not measured.
        skipped: scenario -> why it did not run.
        refused: requests that the server refused.
        untested: why nothing can be said; empty: it can.
    """

    url: str
    options: Options
    target: Target | None = None
    noise: Noise | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    timing: pressure.Timing | None = None
    requests: int = 0
    untested: str = ""

    @property
    def exit_code(self) -> int:
        """0: right, 1: a fault was found, 2: could not be tested."""
        return 1 if self.faults else 2 if self.untested else 0


async def check(
    connection: Connection, options: Options, *, on_progress: Callable[[str], None] = lambda text: None
) -> Result:
    """Test a server.

    Args:
        on_progress: is told what happens, in words.
    """
    client = Client(connection, budget=options.budget)
    run = _Run(Result(connection.url, options), client, on_progress)
    try:
        await run.all()
    except (CannotTestError, RefusedError) as error:
        run.result.untested = str(error)
    finally:
        run.result.requests = client.sent
        await client.close()
    return run.result


class _Run:
    def __init__(self, result: Result, client: Client, on_progress: Callable[[str], None]) -> None:
        self.result = result
        self._client, self._tell = client, on_progress
        options = result.options
        self._writer = Writer(options.seed, output_tokens=options.output_tokens)
        self._judge: Judge | None = None
        self._faulty: set[str] = set()

    async def all(self) -> None:
        """Run every part.

        Raises:
            CannotTestError: nothing can be said.
            RefusedError: the server refused a question of the noise floor's.
        """
        options = self.result.options
        self._tell("asking what the server can do")
        probe = Probe(self._client, self._writer, model=options.model, wanted=options.cold, has_salts=options.has_salts)
        try:
            self.result.target = target = await probe.run(prompt_tokens=options.prompt_tokens)
            if target.has_salts and target.cold is not Cold.SALT and options.cold in (None, Cold.SALT):
                what = "the server knows cache_salt, but a prompt under a new salt has cached tokens of another salt"
                self._add(Violation("tenants", what, self._client.sent))
            self._tell("measuring the noise floor")
            lab = Lab("noise", client=self._client, target=target, writer=self._writer)
            self.result.noise = await measure(lab, budget=options.budget)
            self._judge = Judge(self.result.noise)
            await self._scenarios(target)
        except BudgetSpentError:
            if self.result.noise is None:
                raise CannotTestError(f"--budget-requests {options.budget} is too small to measure the noise") from None
        if not self.result.faults:
            self._fail(self._judged.end(number=self._client.sent))
        self._check_enough()

    async def _scenarios(self, target: Target) -> None:
        chosen = [name for name in SCENARIOS if name not in self._skipped(target)]
        if target.shows_cached and not self.result.options.only:
            await self._time(target)
        while not self._is_over and (names := [name for name in chosen if name not in self._faulty]):
            sent = self._client.sent
            for name in names:
                if not self._is_over:
                    await self._one(name, target)
            if self._client.sent == sent:
                break

    async def _one(self, name: str, target: Target) -> None:
        """Run a scenario once, until it has found a fault."""
        self._tell(f"{name} ({self._client.sent} of {self._client.budget} requests)")
        lab = Lab(name, client=self._client, target=target, writer=self._writer)
        before = len(self.result.comparisons)
        try:
            async for found in SCENARIOS[name](lab):
                self._add(found)
        except RefusedError as refusal:
            self.result.refused.append(f"{name}: {refusal}")
        finally:
            if name not in self._faulty:
                self._fail(self._judged.round(self.result.comparisons[before:]))

    @property
    def _is_over(self) -> bool:
        return self._client.left <= 0 or (self.result.options.stops and bool(self.result.faults))

    def _skipped(self, target: Target) -> Mapping[str, str]:
        reasons = {
            "tenants": "" if target.cold is Cold.SALT else "needs --cold salt",
            "tools": "" if target.tool_choice else "the server takes no tools",
            "drafts": "" if target.has_drafts else "usage shows no draft tokens",
        }
        only = self.result.options.only
        reasons |= {name: "not asked for" for name in SCENARIOS if only and name not in only}
        self.result.skipped = {name: reason for name, reason in reasons.items() if reason}
        return self.result.skipped

    async def _time(self, target: Target) -> None:
        self._tell("comparing usage with the time it took")
        lab = Lab("usage", client=self._client, target=target, writer=self._writer)
        try:
            self.result.timing = timing = await pressure.measure_time(lab)
        except RefusedError as refusal:
            self.result.refused.append(f"usage: {refusal}")
            return
        if timing.is_refuted:
            self._add(
                Violation("usage", f"usage claims cached tokens that were computed: {timing.text}", self._client.sent)
            )

    def _add(self, found: Comparison | Violation) -> None:
        if isinstance(found, Violation):
            self._fail([Fault(found.scenario, "claim", found.what, found.number)])
            return
        target = self.result.target
        assert target is not None, "scenarios run after the probe"
        if not _is_cold(found, target):
            if target.cold is Cold.SALT:
                cached = found.reference.cached_tokens
                what = f"{found.what}: a prompt under a new salt had {cached} cached tokens"
                self._fail([Fault("tenants", "claim", what, found.number)])
            return
        self.result.comparisons.append(found)
        self._fail(self._judged.one(found))

    @property
    def _judged(self) -> Judge:
        assert self._judge is not None, "scenarios run after the noise floor"
        return self._judge

    def _fail(self, faults: Sequence[Fault]) -> None:
        """Report faults of scenarios that have none yet."""
        for fault in faults:
            if fault.scenario not in self._faulty:
                self._faulty.add(fault.scenario)
                self.result.faults.append(fault)
                self._tell(f"FAULT in {fault.scenario}: {fault.what}")

    def _check_enough(self) -> None:
        hits = sum(one.is_hit for one in self.result.comparisons)
        if hits < _MIN_HITS and not self.result.faults:
            self.result.untested = (
                f"only {hits} answers came from the cache, of {len(self.result.comparisons)} compared"
            )


def _is_cold(found: Comparison, target: Target) -> bool:
    """Whether the reference was computed. Texts of a chat template are shared by all prompts."""
    cached, length = found.reference.cached_tokens or 0, found.reference.prompt_tokens or 0
    return cached <= (length // 4 if target.cold in (Cold.LINE, Cold.OFF) else 0)


def figures(result: Result) -> dict[str, dict[str, Any]]:
    """Counts per scenario, for all reports."""
    rows: dict[str, dict[str, Any]] = {}
    for name in SCENARIOS:
        found = [one for one in result.comparisons if one.scenario == name]
        nats = [one.difference.nats for one in found if one.difference.nats is not None]
        rows[name] = {
            "comparisons": len(found),
            "hits": sum(one.is_hit for one in found),
            "texts_differ": sum(one.difference.diverged_at is not None for one in found),
            "largest_nats": max(nats, default=None),
            "faults": sum(fault.scenario == name for fault in result.faults),
            "skipped": result.skipped.get(name, "") if found or name in result.skipped else _why_empty(name, result),
        }
    return rows


def _why_empty(name: str, result: Result) -> str:
    """Why a scenario that was asked for has compared nothing."""
    if any(refusal.startswith(f"{name}: ") for refusal in result.refused):
        return "the server refused a request"
    if result.requests >= result.options.budget:
        return "no requests were left"
    return "a fault was found before" if result.faults else "nothing could be compared"
