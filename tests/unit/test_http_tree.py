"""GET /cache/tree: who sees what of the largest prefixes."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from launch.http.app import build_app
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.types import CacheAction, EngineStats, TreeQuery
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_ALICE, _BOB, _OPERATOR, _SCRAPER = "alice's key", "bob's key", "the operator's key", "the scraper's key"
_LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


class TreeEngine(ScriptedEngine):
    """Answers with a new copy, as an engine does, and keeps the queries."""

    async def admin(self, command: Any) -> Any:
        return copy.deepcopy(await super().admin(command))

    @property
    def queries(self) -> list[TreeQuery]:
        return [command.tree for command in self.commands if command.tree is not None]


@pytest.fixture
def engine(tokenizer: Tokenizer) -> TreeEngine:
    engine = TreeEngine(tokenizer)
    head = tokenizer.encode("<script>alert(1)</script>", add_special_tokens=False)
    leaf = prefix(id="b", head=head)
    root = prefix(id="a", tenant="", prefixes=[leaf, prefix(id="c")])
    engine.answer = {"step": 9, "tiers": {"host": {**prefix(prefixes=[root]), "is_complete": True}}}
    return engine


def prefix(**fields: Any) -> dict[str, Any]:
    facts = {"start": 0, "tokens": 16, "pages": 1, "locked_pages": 0, "last_used": 3, "ends": 1}
    return {**facts, "others": {"prefixes": 0, "pages": 0}, "prefixes": [], **fields}


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tenants(path: Path) -> str:
    rights = {
        "alice": (_ALICE, ""),
        "bob": (_BOB, ""),
        "operator": (_OPERATOR, "admin"),
        "scraper": (_SCRAPER, "metrics"),
    }
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()} {right}\n" for name, (key, right) in rights.items()]
    path.write_text("".join(lines))
    path.chmod(0o600)
    return str(path)


def test_token_ids_become_text_and_nothing_else_changes(engine: TreeEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            response = await client.get("/cache/tree?limit=7&depth=3", headers=_LOCAL)
            again = await client.get("/cache/tree?limit=7&depth=3", headers=_LOCAL)
        answer = response.json()
        assert response.headers["content-type"] == "application/json"
        assert (answer["step"], answer["page_tokens"], answer["replica"], answer["replicas"]) == (9, 16, "", [])
        (root,) = answer["tiers"]["host"]["prefixes"]
        assert [each.get("text") for each in root["prefixes"]] == ["<script>alert(1)</script>", None]
        assert '"head"' not in response.text
        assert again.json() == answer and len(engine.commands) == 1  # one walk for all who look at the same time
        assert engine.commands[0].kind is CacheAction.TREE
        assert engine.queries == [TreeQuery(7, 3, (("", ""),), True)]

    run(scenario())


def test_a_tenant_asks_for_its_own_tree_and_an_operator_for_all(
    engine: TreeEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    statuses = {"": 401, "nobody's": 401, _ALICE: 200, _BOB: 200, _OPERATOR: 200, _SCRAPER: 200}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=tenants(tmp_path / "tenants")) as client:
            for key, status in statuses.items():
                tried = "?tenant=alice&is_all=true&tenants=alice&salt=&cache_salt="
                assert (await client.get(f"/cache/tree{tried}", headers=header(key))).status_code == status, key
            ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            for key in (_ALICE, _BOB, _OPERATOR):
                assert (await client.post("/v1/completions", json=ask, headers=header(key))).status_code == 200
            assert (await client.post("/cache/tree", json={}, headers=header(_OPERATOR))).status_code == 404

    run(scenario())
    salts = [request.cache_salt for request in engine.requests]  # under which the prompts of the three are cached
    alice, bob, operator, scraper = engine.queries
    assert not (alice.is_all or bob.is_all or scraper.is_all) and operator.is_all
    assert alice.tenants == ((salts[0], "alice"),) and bob.tenants == ((salts[1], "bob"),)
    assert operator.tenants[0] == (salts[2], "operator")  # whose text is shown
    assert dict(operator.tenants).items() >= {salts[0]: "alice", salts[1]: "bob"}.items()


def test_without_keys_only_this_machine_may_ask_and_no_web_page(engine: TreeEngine, tokenizer: Tokenizer) -> None:
    async def status(app: Any, *, client: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app, client=(client, 4321))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as found:
            return (await found.get("/cache/tree", headers=headers)).status_code

    async def scenario() -> None:
        app = build_app(engine, config=Config(), info=await engine.info(), tokenizer=tokenizer)
        assert await status(app, client="192.0.2.1") == 403
        assert await status(app, client="127.0.0.1", origin="http://127.0.0.1:8000") == 403
        for host in (
            "127.0.0.1",
            "127.0.0.1:8000",
            "localhost:8000",
            "LOCALHOST",
            "x.localhost",
            "[::1]:8000",
            "[::1]",
        ):
            assert await status(app, client="127.0.0.1", host=host) == 200, host
        # A name that its owner can let lead here.
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[x"):
            assert await status(app, client="127.0.0.1", host=host) == 403, host
        keyed = build_app(engine, config=Config(api_key="k"), info=await engine.info(), tokenizer=tokenizer)
        assert await status(keyed, client="192.0.2.1", host="llm.example") == 401
        assert await status(keyed, client="192.0.2.1", host="llm.example", authorization="Bearer k") == 200

    run(scenario())


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit=٣", "depth=0", "depth=33", "limit="]
)
def test_numbers_are_checked(engine: TreeEngine, tokenizer: Tokenizer, query: str) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            refused = await client.get(f"/cache/tree?{query}", headers=_LOCAL)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == query.partition("=")[0]
        assert engine.commands == []

    run(scenario())


def test_one_replica_is_asked(engine: TreeEngine, tokenizer: Tokenizer) -> None:
    engine.figures = {"replicas": {"4": EngineStats(), "7": EngineStats()}}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for query, name in (("", "4"), ("?replica=7", "7")):
                answer = (await client.get(f"/cache/tree{query}", headers=_LOCAL)).json()
                assert (answer["replica"], answer["replicas"], engine.commands[-1].replica) == (name, ["4", "7"], name)
            engine.answer = ConfigError("there is no replica '9'; replicas: 4, 7")
            refused = await client.get("/cache/tree?replica=9", headers=_LOCAL)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica")

    run(scenario())
