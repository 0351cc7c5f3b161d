"""https: the real client, the command's own client, and certificates that cannot be used."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from launch.cli import client as own_client
from launch.http.bind import bind
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from tests.security.certificates import Authority, needs_openssl
from tests.security.raw import GET, answer, connection, is_ended
from tests.unit.scripted import TEXT, ScriptedEngine, over_port, run

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> dict[str, str]:
    """Settings of a server with a good certificate."""
    certificate, key = authority.sign("server")
    return {"tls_cert": str(certificate), "tls_key": str(key)}


def test_the_official_client_and_our_commands_speak_https(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    authority: Authority,
    server: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def status(endpoint: str, certificate: str = "") -> dict[str, object]:
        return own_client.ask(endpoint, path="/status", key="", timeout_s=10, certificate=certificate)

    async def scenario() -> None:
        async with over_port(engine, tokenizer, **server) as endpoint:
            assert endpoint.startswith("https://127.0.0.1:")
            trusting = httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority.certificate)))
            async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="x", http_client=trusting) as client:
                whole = await client.completions.create(model="tiny", prompt="x", max_tokens=100)
                assert whole.choices[0].text == TEXT
                stream = await client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
                assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
            async with httpx.AsyncClient() as stranger:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.get(f"{endpoint}/health")
            assert (await asyncio.to_thread(status, endpoint, server["tls_cert"]))["model"] == "tiny"
            with pytest.raises(own_client.ResponseError, match="set RAYCACHE_CA_FILE to its CA"):
                await asyncio.to_thread(status, endpoint)
            monkeypatch.setenv("RAYCACHE_CA_FILE", str(authority.certificate))
            assert (await asyncio.to_thread(status, endpoint))["model"] == "tiny"
            async with connection(endpoint) as (reader, writer):  # in plain text
                writer.write(GET)
                assert await is_ended(reader, within_s=30)

    run(scenario())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(engine: ScriptedEngine, tokenizer: Tokenizer, server: dict[str, str]) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, **server) as endpoint:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.set_ciphers("ALL:@SECLEVEL=0")
            for version, is_good in [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)]:
                context.maximum_version = version
                if not is_good:
                    with pytest.raises((ssl.SSLError, ConnectionError)):
                        async with connection(endpoint, tls=context):
                            pass
                else:
                    async with connection(endpoint, tls=context) as (reader, writer):
                        writer.write(GET)
                        assert (await answer(reader))[0] == 200

    run(scenario())


def test_handshakes_that_do_not_go_on_give_way(
    engine: ScriptedEngine, tokenizer: Tokenizer, authority: Authority, server: dict[str, str]
) -> None:
    async def scenario() -> None:
        many = {"max_connections": 4, "header_timeout_s": 2.0}
        async with over_port(engine, tokenizer, **server, **many) as endpoint:
            readers = []
            for _ in range(12):
                url = httpx.URL(endpoint)
                reader, _ = await asyncio.open_connection(url.host, url.port)
                readers.append(reader)
            context = ssl.create_default_context(cafile=str(authority.certificate))
            async with connection(endpoint, tls=context) as (reader, writer):
                writer.write(GET)
                assert (await answer(reader))[0] == 200
            assert all([await is_ended(reader, within_s=30) for reader in readers])

    run(scenario())


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.http.serve._REFRESH_TICKS", 1)
    certificate, key = (Path(shutil.copy(path, tmp_path)) for path in authority.sign("first"))
    renewed = authority.sign("second")
    context = ssl.create_default_context(cafile=str(authority.certificate))

    async def subject(endpoint: str) -> str:
        async with connection(endpoint, tls=context) as (_, writer):
            found: str = dict(field[0] for field in writer.get_extra_info("peercert")["subject"])["commonName"]
            return found

    async def scenario() -> None:
        async with over_port(engine, tokenizer, tls_cert=str(certificate), tls_key=str(key)) as endpoint:
            assert await subject(endpoint) == "first"
            certificate.write_text("broken")
            await asyncio.sleep(0.5)
            assert await subject(endpoint) == "first"
            shutil.copy(renewed[1], key)
            shutil.copy(renewed[0], certificate)
            async with asyncio.timeout(60):
                while await subject(endpoint) != "second":
                    await asyncio.sleep(0.05)

    run(scenario())


def test_what_cannot_be_used_is_refused_before_anything_listens(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.sign("good")
    _, other_key = authority.sign("other")
    expired, expired_key = authority.sign("expired", valid="20200101000000Z/20210101000000Z")
    future, future_key = authority.sign("future", valid="20900101000000Z/20910101000000Z")
    people, people_key = authority.sign("people", extensions="extendedKeyUsage=clientAuth")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, timeout=30)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for (first, second), words in {
        (tmp_path / "none.pem", key): "tls_cert=.*none.pem.*cannot be read: No such file",
        (certificate, tmp_path / "none.key"): "tls_key=.*none.key.*cannot be read",
        (certificate, other_key): "other.key.* is not the key of .*good.pem",
        (expired, expired_key): "has expired; renew it",
        (future, future_key): "not valid yet",
        (people, people_key): "not meant for servers",
        (certificate, locked): "has a password; remove it",
        (nothing, key): "no certificate in PEM format",
        (certificate, certificate): "no private key in PEM format",
        (certificate, tmp_path): "cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=words):
            bind(Config(port="auto", tls_cert=str(first), tls_key=str(second)))
    with pytest.raises(ConfigError, match="tls_cert needs tls_key"):
        Config(tls_cert="x")


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_key_that_this_user_may_not_read_is_refused(authority: Authority) -> None:
    certificate, key = authority.sign("secret")
    key.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        bind(Config(port="auto", tls_cert=str(certificate), tls_key=str(key)))


def test_a_key_that_all_can_read_and_a_certificate_that_ends_soon_are_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.sign("soon", valid="20200101000000Z/20991231235959Z")
    key.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        bind(Config(port="auto", tls_cert=str(certificate), tls_key=str(key))).close()
    assert "can read the private key" in caplog.text and "expires" not in caplog.text
