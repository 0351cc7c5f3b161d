"""Ranks that are killed or frozen while a service decodes, loads pages from the host or computes prompts.

The body of tests/actors/test_faults.py on the CPU, and of tests/gpu/test_faults.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from raycache.llm import LLM
from raycache.types import CacheAction, CacheCommand, EngineStats, SamplingParams
from tests.actors.serving import Service, serving
from tests.actors.test_survival import Heard, listen, prompts, spoken

PAGE = 16
CHUNK = 16
"""Tokens per step, so that long prompts take many. Steps this short are not timed, so no load from the host is left out
as slower than computing; on GPUs they are recorded."""
TIMEOUT_S = 10.0
_LONG = 1600
_OUTPUT = 240
_FEW = 16
_CALM_S = 60.0


class Moment(StrEnum):
    """What a service does when it loses a rank."""

    DECODE = "decode"
    LOAD = "load"
    PREFILL = "prefill"


@dataclass(frozen=True)
class Fault:
    """A rank's end.

    Attributes:
        how: SIGKILL or SIGSTOP.
        moment: what the ranks do then.
        victim: index among the processes of ranks, which are in no order.
    """

    how: signal.Signals
    moment: Moment
    victim: int

    def __str__(self) -> str:
        return f"{self.how.name} of process {self.victim} in {self.moment}"


FAULTS = [
    Fault(how, moment, victim)
    for moment, victim in ((Moment.DECODE, 1), (Moment.LOAD, 0), (Moment.PREFILL, 1))
    for how in (signal.SIGKILL, signal.SIGSTOP)
]


def ranks() -> list[psutil.Process]:
    """The processes below this one that run plans."""
    return _titled("ray::RankActor.run")


def spare_ranks() -> list[psutil.Process]:
    """Those that stand by, once they have imported everything."""
    return _titled("ray::RankActor")


def _titled(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).strip() == title:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.create_time())


async def until_there_are(count: int, of: Any) -> list[psutil.Process]:
    """Wait for so many processes."""
    deadline = time.monotonic() + 120
    while len(found := of()) != count:
        assert time.monotonic() < deadline, f"{len(found)} processes instead of {count}"
        await asyncio.sleep(0.05)
    return found


class Faults:
    """A service that loses ranks, one after the other, and answers as if it had not.

    Args:
        service: with a host tier, of two ranks.
        oracle: the same model in this process, unsplit, in float32.
        doubt: by how much the log-probability of an answer's token may be below that of the best one, since numbers
            are rounded. 0: answers are those from before the fault, token by token.
    """

    def __init__(self, service: Service, oracle: LLM, *, doubt: float) -> None:
        self._service, self._oracle, self._doubt = service, oracle, doubt
        self._seed = 100
        self.slowest_s: dict[Fault, float] = {}

    async def survive(self, fault: Fault) -> None:
        """Have the fault, and check all that follows."""
        self._seed += 1
        victims, before = await until_there_are(2, ranks), await self._service.engine.stats()
        asked, count = self._prompts(fault.moment)
        calm = await self._calm(fault.moment, asked, count)
        victim, heard = victims[fault.victim], [Heard() for _ in asked]
        if fault.moment is Moment.LOAD:
            await asyncio.sleep(0.3)  # an engine without work has told its ranks so
            victim.suspend()  # its loads cannot end
        streams = [
            asyncio.create_task(listen(self._service, prompt, count, into, temperature=0))
            for prompt, into in zip(asked, heard, strict=True)
        ]
        await self._until(fault.moment, heard)
        at = time.time()
        victim.send_signal(fault.how)
        if fault.moment is not Moment.DECODE:
            assert not any(each.tokens for each in heard), f"{fault}: it came too late"
        else:
            assert any(len(each.tokens) < count for each in heard), f"{fault}: it came too late"
        await asyncio.gather(*streams)
        after = await self._service.engine.stats()
        self._check_stats(fault, before, after, at=at)
        self._check_answers(fault, asked, heard, calm, count=count)
        if fault.moment is Moment.LOAD:
            whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in asked]
            assert [each.cached for each in heard] == whole, fault
        await self._check_host_hits(fault, asked, heard)
        await self._service.engine.check()
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, fault

    def _prompts(self, moment: Moment) -> tuple[list[list[int]], int]:
        """Prompts that were not asked before, and tokens to ask for."""
        if moment is Moment.DECODE:
            return prompts(4, seed=self._seed, shared=40, length=20), _OUTPUT
        return prompts(2, seed=self._seed, shared=0, length=_LONG), _FEW

    async def _calm(self, moment: Moment, asked: Sequence[Sequence[int]], count: int) -> list[Heard]:
        """Answers before the fault. Prompts that are then to be loaded are in the host tier only, others nowhere."""
        answers = [listen(self._service, prompt, count, Heard(), temperature=0) for prompt in asked]
        calm = await asyncio.gather(*answers)
        if moment is Moment.LOAD:
            await self._saved(asked)
            await self._clear("device")
        else:
            await self._clear("device", "host")
        return calm

    async def _until(self, moment: Moment, heard: Sequence[Heard]) -> None:
        if moment is Moment.DECODE:
            while min(len(each.tokens) for each in heard) < 8:
                await asyncio.sleep(0.001)
            return
        if moment is Moment.LOAD:
            # One of them at least: the engine waits for the stopped rank before it looks at others.
            while not (seen := await self._service.engine.stats()).running + seen.waiting:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.5)  # its plan, with the loads, is sent
            return
        computed = (await self._service.engine.stats()).computed_tokens
        while (await self._service.engine.stats()).computed_tokens < computed + 3 * CHUNK:
            await asyncio.sleep(0.001)

    def _check_stats(self, fault: Fault, before: EngineStats, after: EngineStats, *, at: float) -> None:
        assert after.epoch == before.epoch + 1 and after.rebuilds == before.rebuilds + 1, fault
        assert after.engines_lost == before.engines_lost, fault
        noticed_s = after.lost_at - at
        # Death is noticed at once, silence at the end of a wait that began a step ago at most.
        assert noticed_s < (TIMEOUT_S / 2 if fault.how is signal.SIGKILL else TIMEOUT_S + 4.0), (fault, noticed_s)
        assert sum(after.rebuild_s.values()) > 0 and after.rebuild_s["weights"] >= 0, fault
        self.slowest_s[fault] = noticed_s + sum(after.rebuild_s.values())

    def _check_answers(
        self,
        fault: Fault,
        asked: Sequence[Sequence[int]],
        heard: Sequence[Heard],
        calm: Sequence[Heard],
        *,
        count: int,
    ) -> None:
        assert [len(each.tokens) for each in heard] == [count] * len(asked), fault
        assert all(each.finish_reason == "length" for each in heard), fault
        if not self._doubt:
            assert [each.tokens for each in heard] == [each.tokens for each in calm], fault
        whole = [[*prompt, *each.tokens] for prompt, each in zip(asked, heard, strict=True)]
        once = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        for tokens, scored in zip(whole, self._oracle.generate(whole, once), strict=True):
            entries = scored.prompt_logprobs[-count:]
            assert [entry.token_id for entry in entries if entry is not None] == tokens[-count:]
            deficits = [entry.top[0][1] - entry.logprob for entry in entries if entry is not None]
            assert max(deficits) <= (self._doubt or 1e-3), (fault, max(deficits))

    async def _check_host_hits(self, fault: Fault, asked: Sequence[Sequence[int]], heard: Sequence[Heard]) -> None:
        """What the gang after the loss has saved is found in the host tier, and continued with the same tokens."""
        await self._saved(asked)
        await self._clear("device")
        before = (await self._service.engine.stats()).cached_by_tier.get("host", 0)
        again = await listen(self._service, asked[0], 8, Heard(), temperature=0)
        whole = (len(asked[0]) - 1) // PAGE * PAGE
        assert again.cached == whole, fault
        assert (await self._service.engine.stats()).cached_by_tier["host"] == before + whole, fault
        if not self._doubt:
            assert again.tokens == heard[0].tokens[:8], fault

    async def _saved(self, asked: Sequence[Sequence[int]]) -> None:
        """Wait until the whole pages of prompts are in the host tier."""
        deadline = time.monotonic() + _CALM_S
        for prompt in asked:
            command = CacheCommand(CacheAction.INSPECT, prompt=tuple(prompt))
            while (seen := await self._service.engine.admin(command))["tiers"]["host"] < (
                len(prompt) - 1
            ) // PAGE * PAGE:
                assert time.monotonic() < deadline, seen
                await asyncio.sleep(0.05)

    async def _clear(self, *tiers: str) -> None:
        await self._service.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=tiers))


async def lose_ranks(model: Path, faults: Sequence[Fault], *, doubt: float, oracle: LLM, **settings: Any) -> None:
    """Run a service that has these faults, with ranks that stand by."""
    fixed = {"page_size": PAGE, "num_pages": 640, "max_step_tokens": CHUNK, "host_memory": "256MiB"}
    fixed |= {"rank_timeout_s": TIMEOUT_S, "spare_ranks": "on"}
    async with serving(model, **{**fixed, **settings}) as service:
        body = Faults(service, oracle, doubt=doubt)
        await listen(service, [5, 6, 7], 8, Heard(), temperature=0)
        await until_there_are(2, spare_ranks)
        for fault in faults:
            await body.survive(fault)
            print(f"{fault}: {body.slowest_s[fault]:.1f} s", flush=True)
        tiers = (await service.engine.stats()).tiers
        assert not tiers["host"]["compute_us_per_token"], "steps were timed: loads may be left out"


async def lose_spare_ranks(model: Path, **settings: Any) -> None:
    """Run a service whose ranks that stand by are lost: they are replaced, with the next gang at the latest."""
    async with serving(model, page_size=PAGE, num_pages=64, spare_ranks="on", **settings) as service:
        prompt = prompts(1, seed=1)[0]
        calm, heard = await listen(service, prompt, _OUTPUT, Heard(), temperature=0), Heard()
        for spare in await until_there_are(2, spare_ranks):
            spare.kill()
        await until_there_are(0, spare_ranks)
        await until_there_are(2, spare_ranks)
        for spare in spare_ranks():
            spare.kill()
        running = asyncio.create_task(listen(service, prompt, _OUTPUT, heard, temperature=0))
        await spoken([heard], at_least=8)
        ranks()[0].kill()
        await running
        assert heard.tokens == calm.tokens
        stats = await service.engine.stats()
        assert stats.rebuilds == 1 and stats.epoch == 2
        await until_there_are(2, spare_ranks)
        await service.engine.check()
