"""`raycache launch` in a lab, and its answers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

from tests.lab.hosts import Lab
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny

_STOP_S = 60.0
PAGE = 16
_DRAW = random.Random(1)
PROMPT = [_DRAW.randrange(3, 260) for _ in range(70)]
WHOLE = len(PROMPT) // PAGE * PAGE
"""Its tokens that fill pages."""


class Launched:
    """A process in the foreground that serves a model.

    Args:
        command: as the lab makes it.
        log: file for what it prints.
    """

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def await_line(self, start: str, *, within_s: float) -> str:
        """The first line that starts so."""
        deadline = time.monotonic() + within_s
        while True:
            for line in self.said.splitlines():
                if line.startswith(start):
                    return line
            assert self._process.poll() is None, f"it has ended:\n{self.said}"
            assert time.monotonic() < deadline, f"no line {start!r} within {within_s:.0f} s:\n{self.said}"
            time.sleep(0.2)

    def interrupt(self) -> int:
        """Ctrl-C; its exit status."""
        for process in self._inside():
            process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        """Wait for its end; its exit status."""
        return self._process.wait(_STOP_S)

    def kill(self) -> None:
        """Whatever it does."""
        for process in self._inside():
            process.kill()
        self._process.kill()
        self._process.wait(_STOP_S)

    def _inside(self) -> list[psutil.Process]:
        """What `nsenter` has started and waits for."""
        try:
            return psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []


@contextmanager
def launched(command: Sequence[str], *, log: Path) -> Iterator[Launched]:
    """A service for the length of a block."""
    service = Launched(command, log=log)
    try:
        yield service
    finally:
        service.kill()


def ask(lab: Lab, endpoint: str, prompt: Sequence[int], count: int) -> tuple[list[int], dict[str, int]]:
    """Ask from the control space; greedy tokens, and cached tokens by tier (those of which there were some)."""
    command = ["python", "-m", "tests.lab.ask", endpoint, json.dumps(list(prompt)), str(count)]
    found = json.loads(lab.run(command, timeout_s=120).splitlines()[-1])
    return found["tokens"], {tier: count for tier, count in found["cached"]["cached_tokens_by_tier"].items() if count}


def tiny_model(lab: Lab) -> Path:
    """A model that all hosts see."""
    folder = lab.folder / "shared" / "tiny"
    make_tiny(folder, "qwen3", max_position_embeddings=2048)
    return tiny_tokenizers.byte_level(folder)


def greedy(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers answers."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    out = oracle.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
