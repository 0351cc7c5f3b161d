"""The page at /ui: who gets it, what its policy forbids, and that it keeps to that; tests/browser looks at it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

import launch.http
from launch.http.app import build_app
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, run

_FOLDER = Path(launch.http.__file__).parent / "ui"
_FILES = {"/ui": "text/html", "/ui/app.js": "text/javascript", "/ui/style.css": "text/css"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


async def get(
    tokenizer: Tokenizer, path: str, *, client: str = "127.0.0.1", root: str = "", **given: Any
) -> httpx.Response:
    engine = ScriptedEngine(tokenizer)
    settings, headers = given.get("settings", {}), given.get("headers", {})
    app = build_app(engine, config=Config(**settings), info=await engine.info(), tokenizer=tokenizer)
    transport = httpx.ASGITransport(app, client=(client, 4321), root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:8000{root}") as found:
        return await found.get(path, headers=headers)


@pytest.mark.parametrize("path", _FILES)
def test_the_page_is_served_here_or_where_there_are_keys(tokenizer: Tokenizer, path: str) -> None:
    async def scenario() -> None:
        answer = await get(tokenizer, path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, f"{_FILES[path]}; charset=utf-8")
        assert (await get(tokenizer, path, client="192.0.2.1")).status_code == 403
        assert (await get(tokenizer, path, headers={"host": "evil.example"})).status_code == 403
        with_key = {"settings": {"api_key": "k"}, "client": "192.0.2.1", "headers": {"host": "llm.example"}}
        assert (await get(tokenizer, path, **with_key)).content == answer.content
        assert (await get(tokenizer, "/cache/tree", **with_key)).status_code == 401

    run(scenario())


def test_nothing_but_its_own_files_may_run_or_be_asked(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        for path in _FILES:
            headers = (await get(tokenizer, path)).headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
            assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
            assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
            assert (
                "unsafe" not in headers["content-security-policy"] and "http" not in headers["content-security-policy"]
            )
            assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"

    run(scenario())


def test_links_are_relative_so_that_a_prefix_changes_nothing(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        for root in ("", "/llm"):
            page = await get(tokenizer, "/ui", root=root)
            for link in re.findall(r'(?:href|src)="([^"#][^"]*)"', page.text):
                if not link.startswith("data:"):
                    url = page.url.join(link)
                    assert (await get(tokenizer, url.path.removeprefix(root), root=root)).status_code == 200
            moved = await get(tokenizer, "/ui/", root=root)
            assert moved.url.join(moved.headers["location"]) == page.url

    run(scenario())


class _Markup(HTMLParser):
    """What the policy forbids in markup: scripts, styles and handlers inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = dict(attrs)
        self.found += [f"{tag} {name}" for name in names if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and not names.get("src")):
            self.found.append(tag)


def test_the_files_need_nothing_that_the_policy_forbids() -> None:
    markup = _Markup()
    markup.feed((_FOLDER / "index.html").read_text(encoding="utf-8"))
    assert markup.found == [] and markup.tags.count("script") == 1
    assert sorted(path.name for path in _FOLDER.iterdir()) == ["app.js", "index.html", "style.css"]
    for path in _FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, path
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "import(",
        ):
            assert forbidden not in text, (path, forbidden)
        assert "localStorage" not in text and "document.cookie" not in text
        assert path.stat().st_size < 40_000


def test_they_are_shipped() -> None:
    from distutils.core import run_setup

    found = run_setup(str(Path(launch.http.__file__).parents[2] / "setup.py"), stop_after="init")
    patterns = found.package_data["launch"]
    shipped = {path for pattern in patterns for path in _FOLDER.parents[1].glob(pattern)}
    assert {_FOLDER / name for name in ("app.js", "index.html", "style.css")} <= shipped
