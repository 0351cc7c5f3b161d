"""KV events in vLLM's format: what is cached, for routers that send a request to where its prefix is.

    batch     msgpack of [time, [event, ...], data-parallel rank]; events are maps with their "type"
    PUB       topic | number, 8 bytes big endian | batch            to every reader; numbers begin with 0
    ROUTER    number | batch, ..., then -1 | nothing                to who sends a number: kept batches from there on

A reader that is too slow misses batches, sees a gap in their numbers and asks for them. Nobody waits for readers.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgpack

from raycache.errors import ConfigError
from raycache.observe.event_address import EventAddress

_log = logging.getLogger(__name__)

Event = Mapping[str, Any]

CLEARED: Event = {"type": "AllBlocksCleared"}
"""Nothing is cached."""

_LOCAL = "LOCAL"
"""Of the storage: this engine's own; blocks of shared ones have no events."""
_MOST_KEPT = 10_000
_END = (-1).to_bytes(8, "big", signed=True)
_BIND_S = 10.0
"""How long an earlier engine's process may still hold the ports."""


class Medium(StrEnum):
    """Where a block is."""

    GPU = "GPU"  # the ranks' own memory, also where that is a CPU's
    CPU = "CPU"  # the host tier
    STORAGE = "STORAGE"  # the storage tier, as vLLM (from 0.27) and Dynamo name it


def block_stored(
    hashes: Sequence[int], *, parent: int | None, tokens: bytes, medium: Medium, namespace: str = ""
) -> Event:
    """Blocks that continue each other are now cached.

    Args:
        hashes: one per block, unsigned 64-bit; equal for equal prefixes in all tiers and on all replicas.
        parent: hash of the block before the first one, None at the start of a prefix.
        tokens: packed token ids of all blocks; empty if they are not known: then the event has the hashes only.
        namespace: marks a prefix that requests without its salt do not share; only at the start of a prefix.
    """
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": array("i", tokens).tolist(),
        "block_size": len(tokens) // 4 // len(hashes),
        "lora_id": None,
        "medium": medium.value,
        "lora_name": None,
    }
    if medium is Medium.STORAGE:
        event["locality"] = _LOCAL
    if namespace:
        event["extra_keys"] = [[namespace], *([None] * (len(hashes) - 1))]
    return event


def block_removed(hashes: Sequence[int], *, medium: Medium) -> Event:
    """Blocks are no longer cached; the list may grow until it is sent."""
    locality = {"locality": _LOCAL} if medium is Medium.STORAGE else {}
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium.value, **locality}


def check_installed() -> None:
    """Check that events can be published, before ranks start.

    Raises:
        ConfigError: pyzmq is not installed.
    """
    try:
        import zmq  # noqa: F401
    except ModuleNotFoundError as cause:
        raise ConfigError(
            "kv_events needs the package pyzmq, which is not installed: pip install 'raycache[events]'"
        ) from cause


def pack(events: Sequence[Event], *, rank: int) -> bytes:
    """Encode a batch, with the time of now."""
    packed: bytes = msgpack.packb([time.time(), events, rank])
    return packed


class KvEventPublisher:
    """Numbers batches, sends them to all readers, and keeps the last ones for those who missed some.

    One thread owns the sockets. Callers only add to the list of kept batches, which is bounded: if the thread were
    too slow, the oldest would be lost, as they are to any reader that asks too late.

    Args:
        address: of the sockets.
        rank: data-parallel rank, in each batch.
        most_queued: batches that wait for one slow reader; it misses later ones.
        most_bytes: limit of the kept batches.
    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be used.
    """

    def __init__(
        self, address: EventAddress, *, rank: int = 0, most_queued: int = 4096, most_bytes: int = 1 << 26
    ) -> None:
        check_installed()
        import zmq

        self._zmq, self._topic, self._rank = zmq, address.topic.encode(), rank
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # of the five below
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._num_published = 0
        self._wakes: zmq.Socket[bytes]
        self._is_closed = False
        self._num_sent = 0
        self._context = context = zmq.Context()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._wakes, self._woken = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._pub.sndhwm = most_queued
        self._router.sndhwm = _MOST_KEPT + 1  # one whole replay
        self._router.router_mandatory = 1  # a full queue is an error, and ends that reader's replay
        self._pub.ipv6 = self._router.ipv6 = ":" in address.host
        try:
            self._open(address)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Number and send a batch."""
        payload = pack(events, rank=self._rank)
        with self._lock:
            if self._is_closed:
                return
            self._kept.append((self._num_published, payload))
            self._num_published += 1
            self._num_bytes += len(payload)
            while len(self._kept) > _MOST_KEPT or (self._num_bytes > self._most_bytes and len(self._kept) > 1):
                self._num_bytes -= len(self._kept.popleft()[1])
            self._wake()

    def close(self) -> None:
        """Stop sending."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake()
        self._thread.join()
        self._context.destroy(linger=0)

    def _open(self, address: EventAddress) -> None:
        self._woken.bind("inproc://wake")
        self._wakes.connect("inproc://wake")
        if address.is_bound:
            self._bind(self._pub, address.endpoint)
        else:
            self._pub.connect(address.endpoint)
        self._bind(self._router, address.replay_endpoint)
        _log.info("KV events at %s, replays at %s", address.endpoint, address.replay_endpoint)

    def _bind(self, socket: Any, endpoint: str) -> None:
        deadline_s = time.monotonic() + _BIND_S
        while True:
            try:
                socket.bind(endpoint)
                return
            except self._zmq.ZMQError as cause:
                if cause.errno != self._zmq.EADDRINUSE or time.monotonic() > deadline_s:
                    raise ConfigError(f"kv_events cannot use {endpoint}: {cause}; choose another port") from cause
                time.sleep(0.1)

    def _wake(self) -> None:
        with suppress(self._zmq.Again):  # it has been woken often enough
            self._wakes.send(b"", self._zmq.NOBLOCK)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        poller.register(self._router, self._zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll())
            if self._woken in ready:
                while self._woken.poll(0):
                    self._woken.recv()
                self._send_new()
            if self._router in ready:
                self._replay(self._router.recv_multipart())
        self._send_new()

    def _send_new(self) -> None:
        with self._lock:
            new = []
            for batch in reversed(self._kept):
                if batch[0] < self._num_sent:
                    break
                new.append(batch)
        for number, payload in reversed(new):
            self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], copy=False)
            self._num_sent = number + 1

    def _replay(self, frames: Sequence[bytes]) -> None:
        """Send the kept batches from a number on to who asked for them."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # nothing that can be answered
        first = int.from_bytes(frames[2], "big")
        with self._lock:
            batches = [batch for batch in self._kept if batch[0] >= first]
        envelope, zmq = list(frames[:2]), self._zmq
        try:
            for number, payload in batches:
                self._router.send_multipart([*envelope, number.to_bytes(8, "big"), payload], zmq.NOBLOCK, copy=False)
            self._router.send_multipart([*envelope, _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as cause:
            _log.warning("a reader of KV events requested a replay but does not read it: %s", cause)
