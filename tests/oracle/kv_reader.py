"""A reader of KV events, as a router is one: vLLM's published structures, and an index that believes nothing."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import zmq

from raycache.cache.tree import RadixTree

# Of vllm/distributed/kv_events.py in vLLM 0.26; fields without a default are always sent.


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


@dataclass(frozen=True)
class Block:
    """A block in a tier, as its event told.

    Attributes:
        parent: hash of the block before it.
        namespace: of the first block of a prefix.
    """

    parent: bytes | int | None
    tokens: tuple[int, ...]
    namespace: tuple[Any, ...] | None = None


Blocks = dict[bytes | int, Block]


class Index:
    """What is cached, as the events tell it: medium -> blocks."""

    def __init__(self) -> None:
        self.blocks: dict[str | None, Blocks] = {"GPU": {}, "CPU": {}, "STORAGE": {}}
        self.num_stored = self.num_removed = self.num_cleared = 0

    def take(self, payload: bytes) -> EventBatch:
        """Apply a batch."""
        batch = DECODER.decode(payload)
        assert batch.events, "an empty batch"
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.blocks = {"GPU": {}, "CPU": {}, "STORAGE": {}}
                    self.num_cleared += 1
        return batch

    def _store(self, event: BlockStored) -> None:
        blocks, parent, size = self.blocks[event.medium], event.parent_block_hash, event.block_size
        is_stored = event.medium == "STORAGE"
        assert len(event.token_ids) == size * len(event.block_hashes) and (size or is_stored)
        assert is_stored or parent is None or parent in blocks, "a block before its parent"
        assert event.locality == ("LOCAL" if is_stored else None)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes) and not any(keys[1:]) and (keys[0] is None or parent is None)
        for number, (name, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert name not in blocks, "a block is stored twice"
            blocks[name] = Block(parent, tuple(event.token_ids[number * size : (number + 1) * size]), key)
            parent = name if size else None  # only hashes are known
        self.num_stored += len(event.block_hashes)

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self.blocks[event.medium]
        for name in event.block_hashes:
            del blocks[name]  # it must be there
        self.num_removed += len(event.block_hashes)

    def check(self) -> None:
        """No block is there without the one that it continues, but in the storage, which evicts in any order."""
        for blocks in (self.blocks["GPU"], self.blocks["CPU"]):
            assert all(block.parent is None or block.parent in blocks for block in blocks.values())


def blocks_of(tree: RadixTree, *, has_points: bool, plain_root: bytes) -> Blocks:
    """What a tree has that can be resumed, by walking it."""
    found: Blocks = {}
    size = tree.page_size
    for node in tree.trie.nodes():
        root, *runs = node.path()
        if has_points and not node.has_point:
            continue
        before: bytes = root.seed  # type: ignore[attr-defined]
        key = None if before == plain_root else (before.hex()[:16],)
        parent = None
        tokens = b"".join(run.key for run in runs)
        for start in range(0, len(tokens), 4 * size):
            page = tokens[start : start + 4 * size]
            before = sha256(before + page).digest()
            (name,) = struct.unpack("<Q", before[:8])
            found[name] = Block(parent, struct.unpack(f"<{size}i", page), key if parent is None else None)
            parent = name
    return found


class Reader:
    """Reads an engine's sockets into an index, and asks for what it missed.

    Args:
        endpoint, replay_endpoint: to connect to.
        most_queued: messages that wait on its side.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, most_queued: int = 1000) -> None:
        self.index = Index()
        self.next = self.num_live = self.num_replayed = 0
        self._context = zmq.Context()
        # A REQ socket would read the first reply only.
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.rcvhwm = most_queued
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._dealer.connect(replay_endpoint)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self, *, timeout_ms: int = 0) -> list[bytes]:
        """Apply what has come, up to the first pause; their topics."""
        topics = []
        while self._sub.poll(timeout_ms):
            topic, number, payload = self._sub.recv_multipart()
            topics.append(topic)
            found = int.from_bytes(number, "big")
            if found > self.next:
                self.ask()
            if found == self.next:
                self._take(payload)
                self.num_live += 1
        return topics

    def ask(self) -> None:
        """Ask for everything from the next batch on."""
        self._dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._dealer.poll(30_000), "no reply to a request for a replay"
            _, number, payload = self._dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return
            assert int.from_bytes(number, "big") == self.next, "a replay with a gap"
            self._take(payload)
            self.num_replayed += 1

    def _take(self, payload: bytes) -> None:
        self.index.take(payload)
        self.next += 1
