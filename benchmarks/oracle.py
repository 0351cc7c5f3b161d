"""Plain transformers generation, one request after the other: what a script without an engine gets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.client import Reply
from benchmarks.trace import Prompt


class Transformers:
    """A model in this process, in float32 on the CPU.

    Args:
        model: directory.
    """

    def __init__(self, model: str) -> None:
        # Any: its generate() is typed for subclasses that mypy does not see.
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Iterable[Prompt]) -> list[Reply]:
        """Greedy, one by one, without a cache between requests."""
        return [self._generate(prompt) for prompt in prompts]

    @torch.inference_mode()
    def _generate(self, prompt: Prompt) -> Reply:
        clock = _TokenClock()
        ids = torch.tensor([prompt.tokens])
        start_s = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.output_len,
            do_sample=False,
            streamer=clock,
        )
        return Reply(start_s, tuple(clock.times_s), len(prompt.tokens), cached_tokens=0)


class _TokenClock:
    """A streamer that notes times. It is shown the prompt first."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt:
            self.times_s.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        pass
