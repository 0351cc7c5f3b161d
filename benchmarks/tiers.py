"""Time to the first token after a long shared prefix, by the tier that the prefix comes from.

    python -m benchmarks.tiers models/smollm2
    python -m benchmarks.tiers models/smollm2 --tokens 2048 --rounds 1 --json out.json

    round:  [ recompute, device, host, file ... ]  [ recompute, device, host, object ... ]

One engine in this process with all tiers. Before each timed prompt an operator's commands clear the tiers above the one
in question, so every way works on the same tokens, in turns; medians count. The object store is moto's S3 server, a
process of its own on this machine: that is the price of the protocol, not of a network.

After each timed prompt its answer is continued from what has just come: all ways must give the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.figures import write_json
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.llm import LLM
from raycache.memory.component import FULL
from raycache.types import CacheAction, CacheCommand, SamplingParams

_PAGE_SIZE = 64
_QUESTION_TOKENS = 48  # less than a page, so that only the prefix is shared
_CHECKED_TOKENS = 8
_WANTED_RATIO = 3.0
"""Of recompute to a hit in a file."""
_SPARE_PAGES = 8
_START_TIMEOUT_S = 60.0
_STORAGE_TIMEOUT_S = 30.0
_FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_CHECKED = SamplingParams(temperature=0.0, max_tokens=_CHECKED_TOKENS, ignore_eos=True)
_ABOVE: dict[str, tuple[str, ...]] = {
    "recompute": ("device", "host", "storage"),
    "device": (),
    "host": ("device",),
    "storage": ("device", "host"),
}
"""Where the prefix comes from -> tiers that must not have it."""


@dataclass
class Figures:
    """Seconds to the first token, and what answers were.

    Attributes:
        seconds: way -> one value per time.
        answers: distinct answers to each question.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        """Way -> seconds."""
        return {way: statistics.median(values) for way, values in self.seconds.items()}


class SharedPrefix:
    """A prefix, questions after it, and an engine that answers them.

    Args:
        llm: with a host tier that holds the prefix.
        num_tokens: of the prefix, a multiple of the page size.
    """

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self._llm, self._num_tokens = llm, num_tokens
        self._random = random.Random(0)
        self._prefix = self._draw(num_tokens)
        self.figures = Figures()

    def begin_round(self) -> None:
        """Ask another question from now on."""
        self._question = self._draw(_QUESTION_TOKENS)
        self._number = len(self.figures.answers)
        self.figures.answers[self._number] = set()

    def ask(self, way: str, *, tier: str) -> None:
        """Time the question with the prefix in one tier, or nowhere ("recompute").

        Raises:
            RuntimeError: the prefix came from somewhere else.
        """
        if _ABOVE[tier]:
            self._llm.cache(CacheCommand(CacheAction.CLEAR, tiers=_ABOVE[tier]))
        prompt = self._prefix + self._question
        start_s = time.perf_counter()
        (first,) = self._llm.generate([prompt], _FIRST)
        self.figures.seconds.setdefault(way, []).append(time.perf_counter() - start_s)
        wanted = {} if tier == "recompute" else {tier: self._num_tokens}
        if dict(first.cached_by_tier) != wanted:
            raise RuntimeError(f"{way}: {first.cached_by_tier} was cached instead of {wanted}: {first.miss}")
        (whole,) = self._llm.generate([prompt], _CHECKED)
        self.figures.answers[self._number] |= {whole.token_ids}
        if whole.token_ids[:1] != first.token_ids:
            raise RuntimeError(f"{way}: token {first.token_ids} became {whole.token_ids[:1]} when asked again")
        self._llm.cache(CacheCommand(CacheAction.STATUS))  # waits for what is still on its way to lower tiers
        print(f"{way:12} {self.figures.seconds[way][-1]:9.3f} s", flush=True)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._llm.info.vocab_size) for _ in range(count)]


def measure(llm: LLM, storages: dict[str, str], *, num_tokens: int, rounds: int, repeats: int) -> Figures:
    """Time all ways in turns.

    Args:
        llm: with the first of the storages attached.
        storages: name -> URL.
        num_tokens: of the prefix.
        rounds: of everything.
        repeats: of every kind of hit in a round; recomputing takes long and is done once per storage.
    """
    prefix = SharedPrefix(llm, num_tokens)
    attached = next(iter(storages))
    for _ in range(rounds):
        prefix.begin_round()
        for name, url in storages.items():
            if name != attached:
                llm.cache(CacheCommand(CacheAction.ATTACH, url=url))
                attached = name
            prefix.ask("recompute", tier="recompute")
            for _ in range(repeats):
                prefix.ask("device", tier="device")
                prefix.ask("host", tier="host")
                prefix.ask(name, tier="storage")
    llm.check()
    return prefix.figures


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server of buckets in a process of its own, with one that is called `bucket`; gives its address.

    Raises:
        RuntimeError: it does not start.
    """
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        port = line.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _make_bucket(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _make_bucket(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        line = http.client.HTTPConnection("127.0.0.1", port)
        try:
            line.request("PUT", "/bucket", body=b"")
            status = line.getresponse().status
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"moto's server does not start: {error}") from error
            time.sleep(0.1)
        else:
            if status != 200:
                raise RuntimeError(f"moto's server makes no bucket: HTTP {status}")
            return
        finally:
            line.close()


def open_llm(model: Path, *, num_tokens: int, storage: str) -> LLM:
    """An engine whose device and host tiers hold the prefix, and waits for storage."""
    settings = {"model": str(model), "device": "cpu", "page_size": _PAGE_SIZE}
    config = Config.from_mapping(settings)
    page_bytes = deploy(config, device_type="cpu").envelope_layout().unit_bytes(FULL)
    num_pages = num_tokens // _PAGE_SIZE + _SPARE_PAGES
    return LLM(
        **settings,
        num_pages=num_pages,
        host_memory=f"{num_pages * page_bytes * 5 // 4 + (16 << 20)}",
        storage=storage,
        prefetch="wait_complete",
        prefetch_timeout_s=_STORAGE_TIMEOUT_S,
        prefetch_share=1.0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; the exit code says whether answers were equal and a hit in a file is fast enough."""
    options = _options(argv)
    torch.set_num_threads(options.threads)
    num_tokens = options.tokens // _PAGE_SIZE * _PAGE_SIZE
    # What a client of S3 must find; moto takes anything.
    os.environ.update({"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark"})
    with tempfile.TemporaryDirectory() as folder, s3_server() as address:
        storages = {
            "file": f"file://{options.directory or folder}/tiers?size=8GiB",
            "object": f"s3://bucket/tiers?endpoint={address}&region=us-east-1",
        }
        with open_llm(options.model, num_tokens=num_tokens, storage=storages["file"]) as llm:
            page_bytes = int(llm.info.tiers["host"]["bytes"]) // (int(llm.info.tiers["host"]["tokens"]) // _PAGE_SIZE)
            print(
                f"{llm.info.model}, prefix of {num_tokens} tokens, {num_tokens // _PAGE_SIZE * page_bytes / 1e6:.0f} MB"
            )
            figures = measure(llm, storages, num_tokens=num_tokens, rounds=options.rounds, repeats=options.repeats)
    are_equal = all(len(answers) == 1 for answers in figures.answers.values())
    ratio = _print_table(figures)
    print(f"answers of all ways {'equal' if are_equal else 'NOT EQUAL'}, {len(figures.answers)} questions")
    if options.json:
        write_json(options.json, {"model": str(options.model), "tokens": num_tokens, "seconds": figures.seconds})
    return 0 if are_equal and ratio >= _WANTED_RATIO else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description="Time to the first token by tier.")
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory")
    parser.add_argument("--tokens", type=int, default=8000, help="of the shared prefix (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of everything (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of every hit in a round (default: %(default)s)")
    parser.add_argument("--directory", metavar="DIR", type=Path, help="of the file storage; default: a temporary one")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


def _print_table(figures: Figures) -> float:
    """Returns: recompute by file."""
    medians = figures.medians()
    print(f"\n{'prefix from':14}{'median s':>10}{'range s':>20}{'times':>7}{'recompute / it':>16}")
    for way, values in figures.seconds.items():
        span = f"{min(values):.3f} - {max(values):.3f}"
        print(f"{way:14}{medians[way]:10.3f}{span:>20}{len(values):7}{medians['recompute'] / medians[way]:16.1f}")
    ratio = medians["recompute"] / medians["file"]
    print(f"recompute / file {ratio:.1f}, wanted at least {_WANTED_RATIO:.0f}")
    return ratio


if __name__ == "__main__":
    sys.exit(main())
