"""Logs as programs read them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from huggingface_hub.utils import logging as hub_logging

from actors.actor_logs import ActorWarnings
from launch.cli.cluster import _Progress, _say
from launch.cli.signals import Interrupt
from launch.observe.requests import observe
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.observe import logs
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run

_LOG = logging.getLogger("tests.logs")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """The root logger as it was."""
    found = logging.getLogger()
    handlers, level = list(found.handlers), found.level
    yield
    found.handlers, found.level = handlers, level
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_an_object_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    fields = logs.set_up("json", rank=3)
    _LOG.info("%d pages", 7)
    fields["epoch"] = 2
    try:
        raise ValueError("no\nroom")
    except ValueError:
        _LOG.exception("東 failed", extra={"path": "/x"})
    warnings.warn("old", stacklevel=1)
    first, second, third = lines(capsys)
    assert abs(datetime.now(UTC).timestamp() - datetime.fromisoformat(str(first.pop("time"))).timestamp()) < 60
    assert first == {"level": "info", "logger": "tests.logs", "message": "7 pages", "rank": 3}
    assert (second["message"], second["level"], second["epoch"], second["path"]) == ("東 failed", "error", 2, "/x")
    assert "ValueError: no\nroom" in str(second["error"])
    assert (third["logger"], third["level"]) == ("py.warnings", "warning")


def test_what_huggingface_hub_says_is_json_too_and_no_line_per_request(capsys: pytest.CaptureFixture[str]) -> None:
    found = hub_logging.get_logger("huggingface_hub.file_download")
    logs.set_up("json")
    found.warning("trying to resume")
    logging.getLogger("httpx2").info("HTTP Request: GET")
    assert [(line["logger"], line["message"]) for line in lines(capsys)] == [
        ("huggingface_hub.file_download", "trying to resume")
    ]


def test_the_progress_of_a_start_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    with _Progress(Interrupt(), log_format="json") as progress:
        progress.show("starting Ray", 0.0)
        progress.show("loading weights: 1 of 2", 0.5)
        progress.show("loading weights: 2 of 2", 1.0)
    _say("stopping", log_format="json")
    assert [line["message"] for line in lines(capsys)] == ["starting Ray", "loading weights", "stopping"]


def test_text_leaves_everything_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = list(logging.getLogger().handlers)
    logs.set_up("text", rank=3)
    assert logging.getLogger().handlers == handlers
    assert capsys.readouterr().err == ""


def test_actors_log_warnings_that_the_launching_process_shows_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_actor("text", rank=3)
    _LOG.info("nothing")
    _LOG.warning("slow\nand late")
    logs.set_up_actor("json", rank=3)
    _LOG.info("nothing")
    _LOG.error("lost")
    written = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["level"] for line in written] == ["warning", "info", "error"]
    chatter = ["bringing up nodes...", '{"time": ', '{"level": "error"}']
    for log_format, shown in (("text", "slow\nand late\nlost\n"), ("json", f"{written[0]}\n{written[2]}\n")):
        warnings_of = ActorWarnings(log_format)
        for pid in (1, 2):  # two ranks say the same
            warnings_of.take({"ip": "10.0.0.7", "pid": pid, "lines": [*chatter, *written]})
        assert capsys.readouterr().err == shown


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_each_request_gets_a_line_with_its_id(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    import httpx

    engine = LoggingEngine(tokenizer)
    found: list[str] = []

    async def scenario() -> None:
        logs.set_up(log_format)
        with observe(Config(log_format=log_format, served_model_name="m")) as observed:
            async with over_port(engine, tokenizer, observed=observed) as endpoint, httpx.AsyncClient() as client:
                for _ in range(2):
                    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
                    answer = await client.post(f"{endpoint}/v1/completions", json=body)
                    found.append(answer.headers["x-request-id"])
                assert (await client.get(f"{endpoint}/v1/nothing")).status_code == 404
                for path in ("/health", "/metrics", "/status"):
                    assert (await client.get(f"{endpoint}{path}")).status_code == 200
            text = observed.metrics.render().decode()
        assert 'raycache_http_responses_total{model_name="m",status="404"} 1.0' in text.splitlines()

    run(scenario())
    if log_format == "text":
        assert "/v1/completions" not in capsys.readouterr().err
        return
    told = [line for line in lines(capsys) if line["logger"] in ("launch.observe.requests", __name__)]
    assert [line["message"] for line in told] == [
        *("engine at work", "POST /v1/completions 200", "engine at work", "POST /v1/completions 200"),
        "GET /v1/nothing 404",
    ]
    assert [line.get("request_id") for line in told] == [found[0], found[0], found[1], found[1], None]
    last = told[1]
    assert (last["status"], last["client"], last["path"]) == (200, "127.0.0.1", "/v1/completions")
    assert 0 < float(str(last["duration_s"])) < 30


class LoggingEngine(ScriptedEngine):
    """Logs while it generates."""

    def _outputs(self, request):  # type: ignore[no-untyped-def]
        logging.getLogger(__name__).info("engine at work")
        return super()._outputs(request)
