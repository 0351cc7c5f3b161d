"""Traces as a collector gets them: over HTTP, in protobuf."""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

from launch.http.app import build_app
from launch.observe.requests import observe
from launch.observe.tracing import Tracer
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError
from raycache.types import FinishReason, Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, run

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
_TRACE, _PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


class Collector:
    """What was sent so far."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.paths: list[str] = []
        self.spans: list[Any] = []

    def named(self, name: str) -> Any:
        """The only span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            found.paths.append(self.path)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found.spans += scope.spans
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join(10)


def facts(span: Any) -> dict[str, Any]:
    values = {item.key: item.value for item in span.attributes}
    return {name: value.string_value or value.int_value for name, value in values.items()}


def genai_facts(span: Any) -> dict[str, Any]:
    """Those of OpenTelemetry's GenAI conventions, 0 included."""
    found: dict[str, Any] = {}
    for item in span.attributes:
        if item.key.startswith("gen_ai."):
            kind = item.value.WhichOneof("value")
            value = getattr(item.value, kind)
            found[item.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


async def ask(engine: ScriptedEngine, tokenizer: Tokenizer, collector: Collector, **body: Any) -> httpx.Response:
    """Post a completion to a server that traces; returns when all spans are sent."""
    config = Config(otlp_endpoint=collector.endpoint, served_model_name="tiny", page_size=16)
    with observe(config) as observed:
        app = build_app(engine, config=config, info=await engine.info(), tokenizer=tokenizer, observed=observed)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"traceparent": f"00-{_TRACE}-{_PARENT}-01"}
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"} | body, headers=headers)
            assert (await client.get("/v1/models")).status_code == 200
    return answer


@pytest.mark.parametrize(
    ("prefix", "path", "is_traced"),
    [("", "/v1/completions", True), ("/api", "/v1/completions", True), ("/v1", "/cache/clear", False)],
)
def test_a_prefix_of_all_routes_changes_not_what_is_traced(
    collector: Collector, prefix: str, path: str, is_traced: bool
) -> None:
    scope = {"type": "http", "method": "POST", "path": prefix + path, "root_path": prefix, "headers": []}
    tracer = Tracer(collector.endpoint, model="m")
    with tracer.serve(scope) as span:
        assert (span is not None) == is_traced
    tracer.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_trace_of_queue_prefill_and_decode(
    tokenizer: Tokenizer, collector: Collector, is_stream: bool
) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.02)
    engine.reuse = {
        "queued_s": 0.005,
        "num_starts": 1,
        "cached_tokens": 24,
        "cached_by_tier": {"device": 16, "host": 8},
        "miss": Miss.EVICTED_HOST,
    }
    answer = {}

    async def scenario() -> None:
        answer["is"] = await ask(engine, tokenizer, collector, prompt=[5] * 30, max_tokens=4, stream=is_stream)

    run(scenario())
    request_id = answer["is"].headers["x-request-id"]
    assert collector.paths[0] == "/v1/traces"
    assert sorted(span.name for span in collector.spans) == ["POST /v1/completions", "decode", "prefill", "queue"]
    server = collector.named("POST /v1/completions")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (_TRACE, _PARENT)
    assert facts(server)["raycache.request_id"] == request_id
    assert facts(server)["http.response.status_code"] == 200
    queue, prefill, decode = (collector.named(name) for name in ("queue", "prefill", "decode"))
    for child in (queue, prefill, decode):
        assert (child.trace_id, child.parent_span_id) == (server.trace_id, server.span_id)
        assert server.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= server.end_time_unix_nano
        assert facts(child)["raycache.request_id"] == f"{request_id}-0"
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 5_000_000
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano - decode.start_time_unix_nano >= 3 * 20_000_000
    assert facts(prefill) | {"raycache.request_id": ""} == {
        "raycache.request_id": "",
        "raycache.prompt_tokens": 30,
        "raycache.cached_tokens": 24,
        "raycache.cached_tokens.device": 16,
        "raycache.cached_tokens.host": 8,
        "raycache.miss": "evicted_host",
    }
    assert facts(decode)["raycache.output_tokens"] == 4
    assert facts(decode)["raycache.finish_reason"] == "length"
    assert genai_facts(server) == {
        gen_ai.GEN_AI_OPERATION_NAME: "text_completion",
        gen_ai.GEN_AI_PROVIDER_NAME: "raycache",
        gen_ai.GEN_AI_REQUEST_MODEL: "tiny",
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: 30,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: 4,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 24,
        gen_ai.GEN_AI_USAGE_CACHE_CREATION_INPUT_TOKENS: 0,  # no whole page
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: ["length"],
    }
    assert not any(genai_facts(child) for child in (queue, prefill, decode))


def test_a_prompt_of_several_choices_is_counted_once(tokenizer: Tokenizer, collector: Collector) -> None:
    engine = ScriptedEngine(tokenizer)
    engine.reuse = {"cached_tokens": 16, "cached_by_tier": {"device": 16}}

    async def scenario() -> dict[str, Any]:
        prompts = [[5] * 50, [6] * 34]
        usage: dict[str, Any] = (
            await ask(engine, tokenizer, collector, prompt=prompts, n=2, max_tokens=3, ignore_eos=True)
        ).json()["usage"]
        return usage

    usage = asyncio.run(scenario())
    found = genai_facts(collector.named("POST /v1/completions"))
    assert found[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == usage["prompt_tokens"] == 84
    assert found[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == usage["completion_tokens"] == 12
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert found[gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == cached == 32
    assert found[gen_ai.GEN_AI_USAGE_CACHE_CREATION_INPUT_TOKENS] == (48 - 16) + (32 - 16)
    assert found[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"] * 4


def test_errors_and_new_starts_are_told(tokenizer: Tokenizer, collector: Collector) -> None:
    engine = ScriptedEngine(tokenizer)
    engine.reuse = {"num_starts": 3}
    engine.failure = (2, FinishReason.ERROR)

    async def scenario() -> None:
        assert (await ask(engine, tokenizer, collector)).status_code == 500
        engine.refusal = EngineStoppedError("the engine is stopped")
        assert (await ask(engine, tokenizer, collector)).status_code == 503

    run(scenario())
    decode = collector.named("decode")
    assert (decode.status.code, decode.status.message) == (2, "RequestFailedError: rank 3 is lost")
    assert len(collector.named("prefill").events) == 1
    servers = [span for span in collector.spans if span.name.startswith("POST")]
    assert [(span.status.code, facts(span)["http.response.status_code"]) for span in servers] == [(2, 500), (2, 503)]
    (refused,) = [span for span in collector.spans if span.name == "queue" and span.status.code]
    assert refused.status.message == "EngineStoppedError: the engine is stopped"


def test_a_collector_that_is_away_costs_no_answer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.observe.tracing._FLUSH_MS", 200)
    monkeypatch.setattr("launch.observe.tracing._TIMEOUT_S", 0.5)

    async def scenario() -> None:
        away = Collector("http://127.0.0.1:9")
        async with asyncio.timeout(20):
            assert (await ask(ScriptedEngine(tokenizer), tokenizer, away)).status_code == 200

    run(scenario())


def test_what_cannot_work_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'collector:4318' is not an HTTP URL; write it as http://HOST:4318"):
        Tracer("collector:4318", model="m")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'raycache\[tracing\]'"):
        Tracer("http://127.0.0.1:4318", model="m")


def test_the_packages_are_imported_only_when_asked_for() -> None:
    import subprocess
    import sys

    code = "import sys, launch.http.app, launch.observe.requests; sys.exit('opentelemetry' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
