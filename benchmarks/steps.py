"""An engine driven step by step, with a clock: decode batches, single prompts, and what the GPU does meanwhile."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from raycache.decider.engine import Engine
from raycache.types import GenerateRequest, SamplingParams

_WARM_STEPS = 8
"""Of a batch, before its steps count."""
_GAP_US = 5.0
"""In longer pauses between kernels the GPU waits for the host."""

Prompt = Sequence[int]


@dataclass(frozen=True)
class First:
    """The first token of a prompt.

    Attributes:
        seconds: to it.
        cached: tier -> prompt tokens that came from it.
    """

    seconds: float
    cached: Mapping[str, int]


@dataclass(frozen=True)
class Trace:
    """What a GPU did, per step.

    Attributes:
        busy_s: seconds in which it computed, short pauses between kernels included.
        kernels: name -> launches and seconds.
    """

    busy_s: float
    kernels: Mapping[str, tuple[float, float]]

    def describe(self, count: int) -> str:
        """The kernels that take most."""
        rows = sorted(self.kernels.items(), key=lambda row: -row[1][1])
        launches, spent_s = (sum(figures[index] for _, figures in rows) for index in (0, 1))
        lines = [f"{1e6 * took_s:10.1f} us{calls:8.1f} x  {name[:100]}" for name, (calls, took_s) in rows[:count]]
        return "\n".join([f"{1e6 * spent_s:10.1f} us{launches:8.1f} x  all, per step", *lines])


class Clock:
    """Runs requests of random tokens.

    Args:
        engine: without requests.
        seed: of the tokens.
    """

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._ids = map(str, itertools.count())

    def draw(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return self._random.choices(range(self._engine.info.vocab_size), k=tokens)

    def first(self, prompt: Prompt) -> First:
        """Ask for one token."""
        start_s = time.perf_counter()
        self._add(prompt, tokens=1)
        cached: Mapping[str, int] = {}
        end_s = start_s
        while self._engine.has_requests:
            for output in self._engine.step():
                cached, end_s = output.cached_by_tier, time.perf_counter()
        return First(end_s - start_s, cached)

    @contextmanager
    def decoding(self, prompts: Sequence[Prompt], *, steps: int) -> Iterator[int]:
        """Within it every prompt has its first token, and each step gives each one more, for at least `steps` steps.

        Gives the tokens that the sequences have on average at its begin.
        """
        # Prompts that are done early decode while the others are still computed.
        ids = {self._add(prompt, tokens=steps + _WARM_STEPS + 2 * len(prompts) + 64) for prompt in prompts}
        waiting, generated = set(ids), 0
        while waiting:
            generated += self._step(waiting)
        for _ in range(_WARM_STEPS):
            generated += self._step(set())
        try:
            yield sum(map(len, prompts)) // len(prompts) + generated // len(prompts)
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
            while self._engine.has_requests:
                self._engine.step()

    def step_seconds(self, count: int, *, batch: int) -> list[float]:
        """Time steps of a batch that decodes.

        Raises:
            RuntimeError: a step did not give every sequence one token.
        """
        found, last_s = [], time.perf_counter()
        for _ in range(count):
            got = self._step(set())
            now_s = time.perf_counter()
            found.append(now_s - last_s)
            last_s = now_s
            if got != batch:
                raise RuntimeError(f"a step of a batch of {batch} gave {got} tokens; is the cache too small for it?")
        return found

    def step(self) -> int:
        """Take a step of a batch that decodes; how many tokens it gave."""
        return self._step(set())

    def trace(self, steps: int) -> Trace:
        """Look at what the GPU does in steps of a batch that decodes.

        Raises:
            RuntimeError: nothing was seen.
        """
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(steps):
                self._engine.step()
            torch.cuda.synchronize()
        events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
        if not events:
            raise RuntimeError("the profiler saw no kernel; is its library (CUPTI) there?")
        kernels: dict[str, tuple[float, float]] = {}
        for event in events:
            count, spent_s = kernels.get(event.name, (0.0, 0.0))
            kernels[event.name] = count + 1 / steps, spent_s + event.time_range.elapsed_us() / 1e6 / steps
        spans = sorted((event.time_range.start, event.time_range.end) for event in events)
        return Trace(_covered(spans) / 1e6 / steps, kernels)

    def _step(self, waiting: set[str]) -> int:
        """Take a step; whoever got a token leaves `waiting`. Returns tokens."""
        got = 0
        for output in self._engine.step():
            if output.finish_reason is not None:
                raise RuntimeError(f"a request ended with {output.finish_reason} while its batch was to go on")
            if output.token_ids:
                waiting.discard(output.request_id)
                got += len(output.token_ids)
        return got

    def _add(self, prompt: Prompt, *, tokens: int) -> str:
        request_id = next(self._ids)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._engine.add(GenerateRequest(request_id, prompt, sampling))
        return request_id


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Microseconds that spans, by their begin, cover with the short gaps between them."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        if start - end > _GAP_US:
            end = start
        total += max(0.0, stop - end)
        end = max(end, stop)
    return total
