"""KV events over their sockets, read as routers read them."""

from __future__ import annotations

import socket
import sys
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from raycache.config import Config
from raycache.errors import ConfigError
from raycache.llm import LLM
from raycache.observe.event_address import EventAddress
from raycache.observe.kv_events import CLEARED, Event, KvEventPublisher, Medium, block_removed, block_stored
from raycache.types import CacheAction, CacheCommand
from tests.oracle.kv_reader import DECODER, AllBlocksCleared, BlockRemoved, Blocks, BlockStored, Reader
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level

SIZE = 4


def free_ports() -> tuple[int, int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as one, closing(socket.create_server(("127.0.0.1", 0))) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def address() -> EventAddress:
    port, replay_port = free_ports()
    return EventAddress("127.0.0.1", port, replay_port, "kv@pod@model")


@pytest.fixture
def publisher(address: EventAddress) -> Iterator[KvEventPublisher]:
    with closing(KvEventPublisher(address, rank=3)) as publisher:
        yield publisher


def stored(number: int, *, namespace: str = "") -> Event:
    tokens = array("i", range(number, number + SIZE)).tobytes()
    return block_stored([number], parent=None, tokens=tokens, medium=Medium.GPU, namespace=namespace)


def test_batches_are_what_the_published_decoder_reads(address: EventAddress, publisher: KvEventPublisher) -> None:
    top = (1 << 64) - 1
    publisher.publish(
        [
            CLEARED,
            block_stored(
                [top, 5], parent=None, tokens=array("i", range(8)).tobytes(), medium=Medium.GPU, namespace="n"
            ),
            block_removed([5, top], medium=Medium.CPU),
        ]
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address.replay_endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        empty, number, payload = dealer.recv_multipart()
        end = dealer.recv_multipart()
    assert (empty, number) == (b"", bytes(8)) and end == [b"", b"\xff" * 8, b""]
    batch = DECODER.decode(payload)
    assert batch.ts > 1.7e9 and batch.data_parallel_rank == 3
    assert batch.events == [
        AllBlocksCleared(),
        BlockStored([top, 5], None, list(range(8)), 4, None, "GPU", None, extra_keys=[("n",), None]),
        BlockRemoved([5, top], "CPU"),
    ]


def test_a_reader_that_comes_late_or_loses_batches_gets_them_replayed(
    address: EventAddress, publisher: KvEventPublisher
) -> None:
    for number in range(1, 6):
        publisher.publish([stored(number)])
    with Reader(address.endpoint, address.replay_endpoint) as reader:
        reader.ask()
        assert (reader.next, reader.num_replayed) == (5, 5)
        topics, last = set(), 6
        while not reader.num_live:  # a subscription takes a while to reach the other side
            publisher.publish([stored(last)])
            last += 1
            topics |= set(reader.read(timeout_ms=50))
        reader.ask()
        assert topics == {b"kv@pod@model"}
        assert set(reader.index.blocks["GPU"]) == set(range(1, last))


def test_a_reader_that_does_not_read_stops_nobody_and_sees_a_gap(address: EventAddress) -> None:
    with (
        closing(KvEventPublisher(address, most_queued=1)) as publisher,
        Reader(address.endpoint, address.replay_endpoint, most_queued=1) as reader,
    ):
        number = 1
        while not reader.num_live:
            publisher.publish([stored(number)])
            number += 1
            reader.read(timeout_ms=50)
        first = number
        for number in range(first, first + 300):  # 100 KB each: more than all buffers on the way hold
            publisher.publish([stored(number, namespace="n" * 100_000)])
        before = reader.num_replayed
        reader.read(timeout_ms=50)
        while reader.num_replayed == before:  # the first one behind the gap shows it
            number += 1
            publisher.publish([stored(number)])
            reader.read(timeout_ms=50)
        assert reader.next == number and set(reader.index.blocks["GPU"]) == set(range(1, number + 1))


def test_only_so_many_batches_are_kept(address: EventAddress) -> None:
    with closing(KvEventPublisher(address, most_bytes=1000)) as publisher:
        for number in range(1, 101):
            publisher.publish([stored(number)])
        with Reader(address.endpoint, address.replay_endpoint) as reader:
            reader.next = 95
            reader.ask()
            assert reader.next == 100 and reader.num_replayed == 5
            with pytest.raises(AssertionError, match="gap"):
                reader.next = 0
                reader.ask()


def test_the_publisher_connects_to_a_reader_of_many(address: EventAddress) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.subscribe(b"kv@")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        away = EventAddress.read(f"tcp://[::ffff:127.0.0.1]:{port}?replay={address.replay_port}&topic=kv@a@b")
        assert not away.is_bound
        with closing(KvEventPublisher(away)) as publisher:
            while not sub.poll(50):
                publisher.publish([stored(1)])
            topic, _, payload = sub.recv_multipart()
    assert topic == b"kv@a@b" and len(DECODER.decode(payload).events) == 1


def test_a_port_that_is_taken_is_an_error(
    address: EventAddress, publisher: KvEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycache.observe.kv_events._BIND_S", 0.0)
    with pytest.raises(ConfigError, match=f"cannot use tcp://127.0.0.1:{address.port}.*another port"):
        KvEventPublisher(address)


def test_without_pyzmq_the_error_names_the_command(address: EventAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'raycache\[events\]'"):
        KvEventPublisher(address)
    with pytest.raises(ConfigError, match="pyzmq"):  # before it looks for the model
        LLM("/nowhere", kv_events="tcp://127.0.0.1:5557")


@pytest.mark.parametrize(
    ("url", "endpoint", "replay_endpoint", "topic"),
    [
        ("tcp://*:5557", "tcp://*:5557", "tcp://*:6557", ""),
        ("tcp://localhost:5557?replay=5558", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", ""),
        ("tcp://[::1]:1", "tcp://[::1]:1", "tcp://[::1]:1001", ""),
        (
            "tcp://router.ns:7000?topic=kv@pod@Qwen/Qwen3-8B",
            "tcp://router.ns:7000",
            "tcp://*:8000",
            "kv@pod@Qwen/Qwen3-8B",
        ),
    ],
)
def test_addresses(url: str, endpoint: str, replay_endpoint: str, topic: str) -> None:
    found = EventAddress.read(url)
    assert (found.endpoint, found.replay_endpoint, found.topic) == (endpoint, replay_endpoint, topic)
    assert found.of_replica(2).port == found.port + 2 and found.of_replica(2).replay_port == found.replay_port + 2


@pytest.mark.parametrize(
    "url",
    [
        "",
        "*:5557",
        "http://*:5557",
        "tcp://*",
        "tcp://:5",
        "tcp://*:70000",
        "tcp://*:65000",
        "tcp://*:1/a",
        "tcp://*:1?x=2",
        "tcp://*:1?replay=1",
        "tcp://*:1?replay=a",
    ],
)
def test_other_addresses_are_refused_early(url: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        Config(kv_events=url)


def test_events_of_a_cache_that_keeps_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefix_cache=False"):
        Config(kv_events="tcp://*:5557", prefix_cache=False)


def test_a_model_publishes_what_it_has_cached(tmp_path: Path, address: EventAddress) -> None:
    byte_level(make_tiny(tmp_path))
    url = f"tcp://127.0.0.1:{address.port}?replay={address.replay_port}"
    with (
        closing(LLM(str(tmp_path), num_pages=32, page_size=SIZE, kv_events=url, device="cpu")) as llm,
        Reader(address.endpoint, address.replay_endpoint) as reader,
    ):
        llm.generate([[*range(1, 14)]])
        reader.ask()
        blocks = reader.index.blocks["GPU"]
        assert [block.tokens for block in blocks.values()][:3] == [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
        assert len(blocks) == llm.stats().pages_cached


def test_a_reader_knows_what_a_storage_has_also_after_a_restart_and_evictions(
    tmp_path: Path, address: EventAddress
) -> None:
    byte_level(make_tiny(tmp_path / "model"))
    url = f"tcp://127.0.0.1:{address.port}?replay={address.replay_port}"
    storage = f"file://{tmp_path}/storage?size=64MiB"

    def model() -> LLM:
        return LLM(
            str(tmp_path / "model"),
            num_pages=32,
            page_size=SIZE,
            kv_events=url,
            device="cpu",
            host_memory="8MiB",
            storage=storage,
        )

    def settle(llm: LLM) -> None:
        while llm.engine.has_work:
            llm.engine.step()

    def seen(llm: LLM) -> Blocks:
        settle(llm)
        with Reader(address.endpoint, address.replay_endpoint) as reader:
            reader.ask()
            return reader.index.blocks["STORAGE"]

    with closing(model()) as llm:
        llm.generate([[*range(1, 14)], [*range(1, 6), *range(20, 30)]])
        first = seen(llm)
        objects = llm.cache(CacheCommand(CacheAction.STATUS))["tiers"]["storage"]["objects"]
        assert len(first) >= 5 and objects % len(first) == 0  # as many objects for each page
        known = {block.tokens for block in first.values()}
        assert {(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)} <= known
    with closing(model()) as llm:
        again = seen(llm)
        assert again.keys() == first.keys()
        llm.generate([[*range(1, 14), 40, 41, 42, 43, 44]])
        more = seen(llm)
        assert first.keys() < more.keys()
        llm.cache(CacheCommand(CacheAction.CLEAR))
        assert seen(llm) == {}
        llm.generate([[*range(1, 14)]])
        assert len(seen(llm)) >= 3
        llm.cache(CacheCommand(CacheAction.DETACH))
        assert seen(llm) == {}
