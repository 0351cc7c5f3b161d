"""A steady load on a service in a lab, and what came of it."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.hosts import Lab
from tests.lab.load import Answer
from tests.lab.service import PAGE, greedy

_COUNT = 24
_GROUPS, _EACH, _SHARED, _OWN = 3, 4, 40, 40


@dataclass(frozen=True)
class Work:
    """Prompts and what transformers answers to them."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


def prompts_with_answers(model: Path, *, seed: int) -> Work:
    """Groups of prompts that share their first tokens."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 260) for _ in range(count))

    shared = [tokens(_SHARED) for _ in range(_GROUPS)]
    prompts = tuple(prefix + tokens(_OWN) for _ in range(_EACH) for prefix in shared)
    return Work(prompts, tuple(tuple(greedy(model, prompt, _COUNT)) for prompt in prompts))


class Load:
    """Clients in the control space that ask all the time, as long as the block lasts.

    Args:
        lab: in which they are.
        endpoint: of the service.
        work: what they ask.
        clients: how many.
        deadline_s: of a request.
    """

    def __init__(self, lab: Lab, endpoint: str, work: Work, *, clients: int, deadline_s: float) -> None:
        self._lab, self._endpoint, self._work, self._num_clients = lab, endpoint, work, clients
        file = lab.folder / "shared" / "work.json"
        facts = {"clients": clients, "deadline_s": deadline_s, "count": _COUNT, "pause_s": 0.2}
        file.write_text(json.dumps({"prompts": work.prompts, **facts}), encoding="utf-8")
        self._command = lab.control.command(["python", "-m", "tests.lab.load", endpoint, str(file)])
        self._answers: list[Answer] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Load:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._reader.join(20)

    def between(self, begin_s: float, end_s: float) -> list[Answer]:
        """Requests that were open at some time of it and have ended."""
        with self._lock:
            return [answer for answer in self._answers if answer.end_s >= begin_s and answer.begin_s <= end_s]

    def await_all_served(self, *, since_s: float, within_s: float) -> None:
        """Wait until as many requests as there are prompts have begun since then and ended well."""
        deadline = time.monotonic() + within_s
        while True:
            well = [answer for answer in self.between(since_s, time.monotonic()) if _is_since(answer, since_s)]
            if len(well) >= len(self._work.prompts):
                return
            assert self._process.poll() is None, "the clients have ended"
            assert time.monotonic() < deadline, f"only {len(well)} requests were served within {within_s:.0f} s"
            time.sleep(0.2)

    def is_right(self, answer: Answer) -> bool:
        """Whether all tokens that came are those of transformers."""
        return answer.tokens == list(self._work.answers[answer.prompt][: len(answer.tokens)])

    def pause_s(self, since_s: float) -> float:
        """Longest time since then in which nobody got a token."""
        answers = self.between(since_s, time.monotonic())
        stamps = sorted({since_s, *(stamp for answer in answers for stamp in answer.stamps_s if stamp >= since_s)})
        return max((later - earlier for earlier, later in itertools.pairwise(stamps)), default=0.0)

    def kept(self, *, since_s: float) -> float:
        """Share of what can be reused of the prompts that was cached when each was asked for the first time since then.

        That is their whole pages before the last token, which is always computed.
        """
        first: dict[int, Answer] = {}
        for answer in sorted(self.between(since_s, time.monotonic()), key=lambda answer: answer.begin_s):
            if _is_since(answer, since_s):
                first.setdefault(answer.prompt, answer)
        whole = sum((len(self._work.prompts[prompt]) - 1) // PAGE * PAGE for prompt in first)
        return sum(sum(answer.cached.values()) for answer in first.values()) / whole

    def hosts_with_ranks(self) -> list[int]:
        """Numbers of the hosts on which the gang runs now."""
        command = ["raycache", "status", "--json", "--timeout-s", "20", "--endpoint", self._endpoint]
        [report] = json.loads(self._lab.run(command))
        addresses = {row["node"] for row in report["figures"]["ranks"]}
        return [number for number in range(len(self._lab.hosts)) if self._lab.address(number) in addresses]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = Answer(**json.loads(line))
            with self._lock:
                self._answers.append(answer)


def _is_since(answer: Answer, since_s: float) -> bool:
    return answer.begin_s >= since_s and not answer.error
