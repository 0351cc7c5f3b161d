"""`make demo`: a real model on local Ray ranks, and two questions about one long text.

    python -m launch.demo [DIR]        DIR: model directory; if it does not exist, SmolLM2 is written there

The second question finds the text in the cache, so only the question itself is computed. The server is started with the
command a user would type, and `ask` is a complete client. A model directory with a demo.json, such as those of
demos/hybrids/, is asked the questions in that file.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launch.demo.manual import MANUAL
from launch.demo.model import make_demo_model
from launch.environment import api_key
from launch.service import running, stop
from raycache.errors import ConfigError, RayCacheError, RequestFailedError

_FLAGS = ("--cp", "2", "--port", "auto", "--max-model-len", "4096", "--no-dashboard")
_MAX_TOKENS = 64
_ANSWER_TIMEOUT_S = 300.0
_STOP_S = 60.0


@dataclass(frozen=True)
class Timing:
    """Timing of one answer.

    Attributes:
        first_token_s: from the request to the first token.
        between_tokens_s: mean over the other tokens.
        prompt_tokens, cached_tokens, output_tokens: as counted by the server.
    """

    first_token_s: float
    between_tokens_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Scene:
    """Two questions about one text.

    Attributes:
        text: description of the text.
        system: the text as a system message; empty: it is part of `questions`.
        questions: user messages.
        titles: the questions without the text.
        answers: expected answers; empty: any.
        stop: stop string.
        flags: additional flags for the server.
    """

    text: str
    questions: tuple[str, str]
    titles: tuple[str, str]
    system: str = ""
    answers: tuple[str, ...] = ()
    stop: str = ""
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, directory: Path) -> Scene:
        """Read a model's demo.json; without one, ask about the manual."""
        file = directory / "demo.json"
        if not file.is_file():
            titles = ("Who built the clock?", "With what is the stove fed, and why?")
            first, second = (f"{MANUAL}\n{title} Answer in one sentence." for title in titles)
            return cls(f"a manual of {len(MANUAL.split())} words", (first, second), titles)
        given = json.loads(file.read_text(encoding="utf-8"))
        first, second = given["questions"]
        return cls(
            text=given["text"],
            questions=(first, second),
            titles=(first, second),
            system=given["system"],
            answers=tuple(given["answers"]),
            stop=given["stop"],
            flags=tuple(given["flags"]),
        )

    def messages(self, question: str) -> list[dict[str, str]]:
        """The chat messages for one question."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, {"role": "user", "content": question}]


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code, 0 if the second question was answered from the cache."""
    parser = argparse.ArgumentParser(prog="python -m launch.demo", description="Two questions about one long text.")
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", default=Path("models/smollm2"))
    directory: Path = parser.parse_args(argv).directory
    # Closing the terminal or `kill` must not leave the server running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        print(f"Model: {directory}", flush=True)
        scene = Scene.of(directory)
        if not scene.system:
            make_demo_model(directory)
        with _server(directory, flags=scene.flags) as endpoint:
            return _converse(endpoint, scene)
    except (RayCacheError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def ask(
    endpoint: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int = _MAX_TOKENS, stop: str = ""
) -> tuple[str, Timing]:
    """Stream an answer to the terminal, using only the standard library; any OpenAI client works as well.

    Args:
        endpoint: such as "http://127.0.0.1:8000/v1".
        stop: stop string.
    Raises:
        OSError: the server does not respond, or returns an HTTP error.
        RequestFailedError: the answer ended early.
    """
    body = {
        "model": "demo",
        "messages": list(messages),
        "stop": stop or None,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    texts: list[str] = []
    times = [time.monotonic()]
    for chunk in _events(f"{endpoint}/chat/completions", body):
        if "error" in chunk:
            raise RequestFailedError(chunk["error"]["message"])
        usage = chunk["usage"] or usage
        text = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
        if text:
            times.append(time.monotonic())
            texts.append(text)
            print(text, end="", flush=True)
    print()
    if len(times) < 2 or not usage:
        raise RequestFailedError("the answer ended early; see the server's messages above")
    count = usage["completion_tokens"]
    return "".join(texts), Timing(
        first_token_s=times[1] - times[0],
        between_tokens_s=(times[-1] - times[1]) / max(count - 1, 1),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        output_tokens=count,
    )


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """POST a request and iterate over the JSON of its server-sent events."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key()}"}
    request = urllib.request.Request(url, json.dumps(body).encode("utf-8"), headers)
    # A proxy from the environment cannot reach this machine's loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def _server(directory: Path, *, flags: Sequence[str]) -> Iterator[str]:
    """Run `raycache launch` for the `with` block; yields its endpoint."""
    command = [sys.executable, "-m", "raycache", "launch", str(directory), "--served-model-name", "demo", *_FLAGS]
    command += flags
    print("Server: raycache", *command[3:], "\n", flush=True)
    # In its own session, so that Ctrl-C interrupts only the demo, which then interrupts the server once.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield f"{_endpoint(process)}/v1"
    finally:
        print("\nStopping the server.", flush=True)
        _stop(process)


def _endpoint(process: subprocess.Popen[bytes]) -> str:
    """Wait until the server has registered its endpoint, or has ended."""
    while process.poll() is None:
        for service in running():
            if service.pid == process.pid:
                time.sleep(0.2)  # let it print its table first
                return service.endpoint
        time.sleep(0.1)
    raise ConfigError(f"the server ended with exit code {process.returncode}; see its messages above")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server like Ctrl-C, and kill it if it does not end."""
    # A second Ctrl-C must not interrupt this, which would leave ranks behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for service in running():
        if service.pid == process.pid:
            stop(service, grace_s=_STOP_S)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # it was still starting and not registered
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _converse(endpoint: str, scene: Scene) -> int:
    print("\nWarm-up: ", end="", flush=True)
    ask(endpoint, [{"role": "user", "content": "Say hello."}], max_tokens=8)
    answers, timings = [], []
    for number, (title, question) in enumerate(zip(scene.titles, scene.questions, strict=True), start=1):
        print(f"\nQuestion {number}, about {scene.text}: {title}\nAnswer: ", end="", flush=True)
        answer, timing = ask(endpoint, scene.messages(question), stop=scene.stop)
        print(f"  {_figures(timing)}", flush=True)
        answers.append(answer)
        timings.append(timing)
    first, second = timings
    if scene.answers and tuple(answers) != scene.answers:
        print(f"demo: error: the answers should be {scene.answers}", file=sys.stderr)
        return 1
    if not second.cached_tokens:
        print("demo: error: the second question found nothing in the cache", file=sys.stderr)
        return 1
    ratio = first.first_token_s / second.first_token_s
    print(f"\nThe second answer started {ratio:.1f} times sooner than the first, thanks to the cache.", flush=True)
    return 0


def _figures(timing: Timing) -> str:
    return (
        f"first token after {timing.first_token_s:.2f} s; {timing.prompt_tokens} prompt tokens, "
        f"{timing.cached_tokens} of them from the cache; then {1e3 * timing.between_tokens_s:.0f} ms per token"
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
