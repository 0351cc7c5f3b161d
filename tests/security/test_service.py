"""A whole service with TLS, tenants, both lower tiers and two ranks: what listens, and who gets in and finds what."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from launch.http.keys import add_line, new_key
from tests.actors.launched import endpoint_of, start
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny
from tests.security.certificates import Authority, needs_openssl

pytestmark = needs_openssl
_DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
_ROW = re.compile(r"^\| `(?P<process>[\w.:]+)` \| (?P<ports>\d+) \|", re.MULTILINE)
_PROMPT = list(range(10, 90))  # five pages


@dataclass(frozen=True)
class Served:
    """A service that runs, and its tenants' keys."""

    process: psutil.Process
    endpoint: str
    authority: Authority
    keys: dict[str, str]

    def client(self, tenant: str) -> openai.OpenAI:
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(self.authority.certificate)))
        return openai.OpenAI(base_url=self.endpoint, api_key=self.keys[tenant], http_client=trusting, max_retries=0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))  # Ray's sockets need a short path
    model = folder / "tiny"
    make_tiny(model, "qwen3", max_position_embeddings=2048)
    tiny_tokenizers.byte_level(model)
    authority = Authority.make(folder / "authority")
    certificate, key = authority.sign("localhost")
    keys = {}
    for name, rights in (("alice", ()), ("bob", ()), ("operator", ("admin",))):
        keys[name], line = new_key(name, rights=rights)
        add_line(folder / "tenants", line)
    process = start(
        model,
        folder,
        *("--tp", "2", "--page-size", "16", "--num-pages", "64", "--host-memory", "16MiB"),
        *("--storage", f"file://{folder}/store?size=16MiB", "--api-keys", str(folder / "tenants")),
        *("--tls-cert", str(certificate), "--tls-key", str(key)),
    )
    try:
        yield Served(psutil.Process(process.pid), endpoint_of(process), authority, keys)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_only_what_the_document_lists_listens_and_on_loopback(served: Served) -> None:
    listed = {row["process"]: int(row["ports"]) for row in _ROW.finditer(_DOCUMENT.read_text(encoding="utf-8"))}
    assert len(listed) > 8
    found: Counter[tuple[str, int]] = Counter()
    for process in (served.process, *served.process.children(recursive=True)):
        for one in process.net_connections(kind="inet"):
            if one.status != psutil.CONN_LISTEN:
                assert one.type == socket.SOCK_STREAM, f"{process.name()} takes datagrams at {one.laddr}"
                continue
            assert one.laddr.ip.removeprefix("::ffff:").startswith("127."), (process.name(), one.laddr)
            found[_kind(process, listed), process.pid] += 1
    assert {kind for kind, _ in found} >= {"raycache", "gcs_server", "raylet", "ray::RankActor", "ray::EngineActor"}
    assert {who: count for who, count in found.items() if count > listed[who[0]]} == {}


def test_shared_memory_is_open_to_the_services_user_only(served: Served) -> None:
    seen = []
    for process in (served.process, *served.process.children(recursive=True)):
        for path in Path("/dev/shm").glob(f"raycache-{process.pid}-*"):
            found = path.stat()
            assert found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077, path
            seen.append(path)
    assert seen


def test_no_tenant_finds_what_another_has_sent(served: Served) -> None:
    def cached(tenant: str, salt: str = "") -> int:
        """Tokens that were found for a prompt that all send."""
        body: dict[str, Any] = {"cache_salt": salt} if salt else {}
        with served.client(tenant) as client:
            done = client.completions.create(model="tiny", prompt=_PROMPT, max_tokens=2, extra_body=body)
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("alice") == 0
    own = cached("alice")
    assert own >= 64
    for salt in ("", "alice", served.keys["alice"]):
        assert cached("bob", salt) == 0
    assert cached("alice", "project") == 0
    assert (cached("alice", "project"), cached("alice"), cached("bob")) == (own, own, own)


def test_who_has_no_key_or_not_the_right_one_is_refused(served: Served) -> None:
    with served.client("alice") as client, pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="rck-guess").models.list()
    with served.client("alice") as client, pytest.raises(openai.PermissionDeniedError):
        client.get("/../status", cast_to=httpx.Response)
    assert [model.id for model in served.client("bob").models.list()] == ["tiny"]


def test_the_operators_commands_find_the_service_and_trust_it(served: Served) -> None:
    def status(key: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "raycache", "status", "--json", "--timeout-s", "20"]
        environment = {**os.environ, "RAYCACHE_API_KEY": key}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        reports: list[dict[str, Any]] = json.loads(done.stdout)
        return next(report for report in reports if served.endpoint.startswith(report["endpoint"]))

    assert status(served.keys["operator"])["figures"]["model"] == "tiny"
    assert "403" in status(served.keys["alice"])["error"]


def _kind(process: psutil.Process, listed: dict[str, int]) -> str:
    """The row of the document that a process belongs to."""
    words = process.cmdline()
    for name in sorted(listed, key=len, reverse=True):
        if process.name().startswith(name[:15]) or any(Path(word).name == name for word in words[:4]):
            return name
    if process.name().startswith("ray::"):
        return "ray::"
    pytest.fail(f"{process.name()} {words} listens and is not in {_DOCUMENT}")
