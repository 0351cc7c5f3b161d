"""Commands to replicas over HTTP and from the command line, what replicas cannot share, and figures of several."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from actors.starter import check_replicas, check_storage
from launch.cli.main import main
from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.replicas import ReplicasApi
from launch.http.serve import serve
from raycache.api.replicas import ReplicaAction, ReplicaCommand
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.observe.figures import samples
from raycache.routing.totals import total_answer, total_info, total_stats
from raycache.types import EngineInfo, EngineStats
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine

ROWS = [{"name": "0", "state": "serving", "requests": 2, "work_tokens": 1200}]


class ScriptedReplicas:
    """Notes commands and answers with what it was told to."""

    def __init__(self) -> None:
        self.commands: list[ReplicaCommand] = []
        self.answer: Mapping[str, Any] | ConfigError = {"wanted": 1, "routing": "prefix", "replicas": ROWS}

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        self.commands.append(command)
        if isinstance(self.answer, ConfigError):
            raise self.answer
        return self.answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


async def app_over(tokenizer: Tokenizer, replicas: ScriptedReplicas, **settings: Any) -> tuple[Any, Config]:
    config = Config(model="/models/tiny", port="auto", **settings)
    engine = ScriptedEngine(tokenizer)
    routes: list[Route] = ReplicasApi(replicas, config=config).routes()
    return build_app(engine, config=config, info=await engine.info(), tokenizer=tokenizer, routes=routes), config


def ask(
    tokenizer: Tokenizer, replicas: ScriptedReplicas, method: str, path: str, body: Any = None, **settings: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        app, _ = await app_over(tokenizer, replicas, **settings)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("scale", {"count": 3}, ReplicaCommand(ReplicaAction.SCALE, count=3)),
        ("restart", {}, ReplicaCommand(ReplicaAction.RESTART)),
        ("restart", {"drain_first": True}, ReplicaCommand(ReplicaAction.RESTART, drain_first=True)),
    ],
)
def test_a_command_is_read_and_its_answer_given(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], wanted: ReplicaCommand
) -> None:
    replicas = ScriptedReplicas()
    answer = ask(tokenizer, replicas, "POST", f"/replicas/{path}", body)
    assert answer.status_code == 200 and answer.json() == replicas.answer
    assert replicas.commands == [wanted]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("scale", {"count": 0}, 400, "count"),
        ("scale", {"count": "2"}, 400, "count"),
        ("scale", {"count": 10**9}, 400, "count"),
        ("scale", {}, 400, "count"),
        ("restart", {"drain_last": True}, 400, "drain_last"),
        ("status", {}, 404, "scale, restart"),
        ("explode", {}, 404, "scale, restart"),
    ],
)
def test_a_bad_command_is_refused_and_nothing_done(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    replicas = ScriptedReplicas()
    answer = ask(tokenizer, replicas, "POST", f"/replicas/{path}", body)
    assert answer.status_code == status and says in answer.text, answer.text
    assert replicas.commands == []


def test_what_cannot_be_done_is_said(tokenizer: Tokenizer) -> None:
    replicas = ScriptedReplicas()
    replicas.answer = ConfigError("the replicas are being changed already")
    answer = ask(tokenizer, replicas, "POST", "/replicas/scale", {"count": 2})
    assert answer.status_code == 400 and "changed already" in answer.json()["error"]["message"]


def test_commands_need_the_key_if_there_is_one(tokenizer: Tokenizer) -> None:
    for method, path in (("GET", "/replicas"), ("POST", "/replicas/restart")):
        assert ask(tokenizer, ScriptedReplicas(), method, path, {}, api_key="secret").status_code == 401


def test_the_command_asks_a_running_server(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    replicas = ScriptedReplicas()

    async def run(*words: str) -> int:
        app, config = await app_over(tokenizer, replicas)
        stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(app, sock=bind(config), stop=stop, on_started=started.set_result, config=config)
        )
        code = await asyncio.to_thread(main, ["replicas", *words, "--endpoint", await started])
        stop.set()
        await task
        return code

    assert asyncio.run(run("status")) == 0
    assert "serving" in (shown := capsys.readouterr().out) and "1200" in shown
    drained = {"name": "1", "moved_requests": 4, "saved": {"persisted_pages": 7}}
    replicas.answer = {**replicas.answer, "started": ["2"], "drained": [drained]}  # type: ignore[dict-item]
    assert asyncio.run(run("restart", "--drain-first")) == 0
    shown = capsys.readouterr().out
    assert "started 2" in shown and "drained 1: 4 requests moved, persisted_pages 7" in shown
    assert asyncio.run(run("scale", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["drained"] == [drained]
    assert replicas.commands[1:] == [
        ReplicaCommand(ReplicaAction.RESTART, drain_first=True),
        ReplicaCommand(ReplicaAction.SCALE, count=3),
    ]


def test_a_directory_is_for_one_replica_at_a_time() -> None:
    base: dict[str, Any] = {"model": "/models/tiny", "host_memory": "1GiB"}
    shared = Config(**base, storage="file:///var/cache/raycache?size=1GiB")
    check_replicas(shared, 1)
    with pytest.raises(ConfigError, match=r"file:///DIR/\{replica\}"):
        check_replicas(shared, 2)
    for url in ("file:///var/cache/{replica}?size=1GiB", "s3://bucket/prefix", "redis://host:6379/0", "none"):
        check_storage(url)
        check_replicas(replace(shared, storage=url), 2)
    with pytest.raises(ConfigError, match="one replica"):
        check_storage("faulty+file:///tmp/x?size=1GiB")


def test_a_map_of_places_is_for_one_replica(tmp_path: Path) -> None:
    mapped = Config(model="/models/tiny", placement="0-1@10.0.0.1", tp=2)
    check_replicas(mapped, 1)
    with pytest.raises(ConfigError, match="placement=auto"):
        check_replicas(mapped, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_ingress": "2"}, "needs ingress=serve"),
        ({"ingress": "serve", "num_ingress": "0"}, "num_ingress"),
        ({"ingress": "serve", "num_ingress": "4-2"}, "num_ingress"),
        ({"ingress": "serve", "num_ingress": "many"}, "num_ingress"),
        ({"ingress": "serve", "header_timeout_s": 3.0}, "header_timeout_s"),
    ],
)
def test_settings_of_the_ingress_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(model="/models/tiny", **settings)


def test_a_range_of_ingress_processes_is_read() -> None:
    assert Config(model="m", ingress="serve", num_ingress="1-4").ingress_range == (1, 4)
    assert Config(model="m", ingress="serve", num_ingress="3").ingress_range == (3, 3)


def test_figures_of_replicas_add_up_and_stay_apart() -> None:
    one = EngineStats(
        steps=5,
        running=1,
        finished={"stop": 2},
        spaces={"state": (4, 3)},
        tiers={"host": {"pages_total": 8.0}},
        epoch=3,
        warnings=("tier inert: host",),
    )
    two = EngineStats(steps=7, finished={"stop": 1, "length": 4}, spaces={"state": (4, 1)}, epoch=1)
    total = total_stats({"0": one, "1": two})
    assert (total.steps, total.running, total.epoch) == (12, 1, 3)
    assert total.finished == {"stop": 3, "length": 4}
    assert total.spaces == {"state": (8, 4)} and total.tiers == {"host": {"pages_total": 8.0}}
    assert total.warnings == ("replica 0: tier inert: host",)
    assert total.replicas == {"0": one, "1": two}
    assert total_stats({"0": one}) is one
    # The first replica is away: the other one's series keep their label.
    alone = total_stats({"1": two})
    assert (alone.steps, alone.replicas) == (7, {"1": two})
    assert {sample.labels[0] for sample in samples(alone)} == {"1"}


def test_ranks_and_answers_name_their_replica() -> None:
    info = EngineInfo("tiny", "/models/tiny", 100, (1,), 200, 16, 64, 8, ranks=({"rank": 0}, {"rank": 1}))
    both = total_info({"0": info, "3": info})
    assert [(row["replica"], row["rank"]) for row in both.ranks] == [("0", 0), ("0", 1), ("3", 0), ("3", 1)]
    assert both.num_pages == 64
    found = total_answer({"0": {"cleared_pages": {"device": 3}}, "1": {"cleared_pages": {"device": 4, "host": 1}}})
    assert found["cleared_pages"] == {"device": 7, "host": 1}
    assert found["replicas"]["0"] == {"cleared_pages": {"device": 3}}
    assert total_answer({"0": {"checked": 4}}) == {"checked": 4}
