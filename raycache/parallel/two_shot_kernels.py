"""Triton kernel that sums large tensors of GPUs that reach each other's memory. Imported only where it runs.

Each member adds up a share of the tensor and sends the sum to the others, so each number crosses the wire twice,
whatever the number of members:

    chunk    [share of member 0][share of member 1]...

    1. send each other member my numbers of its share
    2. add up my share, send the sum to all others
    3. copy the sums of the others to the tensor

Programs take chunks in turn. A program does step 1 of a chunk, then step 2 of the one before, then step 3 of the one
before that. What is sent is followed by the number of the chunk, stored with release semantics and read with acquire
semantics by who waits for it. A program counts its chunks over all calls, and they use slots of the memory in turn:

    memory of a member    [program][step 1 or 2][sender]                 numbers of the last chunks
                          [program][slot][step 1 or 2][sender][word]

Three slots are enough. A slot of addends may be overwritten once the receiver's sums of the chunk before in it have
come: it has read them by then. A slot of sums may be overwritten once the receiver's addends of the same new chunk have
come: it has copied what was there before it sent them.

Members must run the same sums in the same order. Program i waits for program i of the others only, so programs need not
run all at once. A kernel that waits for longer than its limit traps, see peer_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from raycache.parallel.peer_kernels import DTYPES, high_of, low_of, pair_of
from raycache.parallel.peer_memory import PeerMemory
from raycache.rounding import ceil_div

_PROGRAMS = 132
_SLOTS = 4
"""A power of two, as chunk numbers begin again after 2^32."""
_CHUNK_WORDS = 8192
_FLAG_WORDS = 32
"""Of a program and step: a cache line."""


class TwoShotSums:
    """A member's side of sums of large tensors, with 33 MiB of memory. Collective, and blocks.

    Raises:
        RuntimeError: the memory cannot be mapped.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._share = 1 << (_CHUNK_WORDS // memory.size).bit_length() - 1  # a power of two
        data = _PROGRAMS * _SLOTS * 2 * memory.size * self._share
        memories = memory.share(4 * (_PROGRAMS * 2 * _FLAG_WORDS + data))
        self._peers = torch.tensor([each.data_ptr() for each in memories], dtype=torch.int64, device=memory.device)
        self._numbers = torch.zeros(_PROGRAMS, dtype=torch.int32, device=memory.device)

    def sum(self, x: Tensor) -> None:
        """Replace x by its sum over members, added in float32 in rank order.

        Args:
            x: contiguous, of a dtype in DTYPES, aligned to 16 bytes and a multiple of them.
        """
        memory, num_vectors = self._memory, x.nbytes // 16
        num_chunks = ceil_div(4 * num_vectors, self._share * memory.size)
        _sum[(min(num_chunks, _PROGRAMS),)](
            x.view(-1).view(torch.int32),
            self._peers,
            self._numbers,
            memory.rank,
            num_vectors,
            memory.limit_ns,
            DTYPE=DTYPES[x.dtype],
            SIZE=memory.size,
            SHARE=self._share,
            PROGRAMS=_PROGRAMS,
            SLOTS=_SLOTS,
            FLAGS=_FLAG_WORDS,
            num_warps=min(max(self._share // 128, 1), 16),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _flag(peers: tl.tensor, member: tl.tensor, step: tl.constexpr, sender: tl.tensor, FLAGS: tl.constexpr) -> tl.tensor:
    """Where a member finds the number of the last chunk of this program that a sender has sent in a step."""
    memory = tl.load(peers + member).to(tl.pointer_type(tl.int32))
    return memory + (tl.program_id(0) * 2 + step) * FLAGS + sender


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    peers: tl.tensor,
    member: tl.tensor,
    step: tl.constexpr,
    sender: tl.tensor,
    number: tl.tensor,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
) -> tl.tensor:
    """Where a member finds the words of a chunk that a sender has sent in a step."""
    memory = tl.multiple_of(tl.load(peers + member).to(tl.pointer_type(tl.int32)), 16)
    slot = tl.program_id(0) * SLOTS + (number & (SLOTS - 1))
    return memory + PROGRAMS * 2 * FLAGS + ((slot * 2 + step) * SIZE + sender) * SHARE


@triton.jit  # type: ignore[untyped-decorator]
def _publish(
    peers: tl.tensor, rank: tl.tensor, step: tl.constexpr, number: tl.tensor, SIZE: tl.constexpr, FLAGS: tl.constexpr
) -> None:
    """Store the other members' flags behind all that the program's threads have stored."""
    tl.debug_barrier()
    for distance in tl.static_range(1, SIZE):
        flag = _flag(peers, (rank + distance) % SIZE, step, rank, FLAGS)
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first st.release.sys.global.u32 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [flag.to(tl.int64), number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _read_flag(flag: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def _wait(flag: tl.tensor, number: tl.tensor, limit_ns: tl.tensor) -> None:
    """Wait until a flag has reached a number."""
    start = globaltimer()
    while _read_flag(flag) - number < 0:
        if globaltimer() - start > limit_ns:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def _send_addends(
    x: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    at: tl.tensor,
    num_words: tl.tensor,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
) -> None:
    """Step 1; `at` is where the first share's words are in x."""
    words = tl.arange(0, SHARE)
    for distance in tl.static_range(1, SIZE):
        member = (rank + distance) % SIZE
        there = at + member * SHARE
        own = tl.load(x + there, mask=there < num_words, other=0)
        place = _place(peers, member, 0, rank, number, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
        tl.store(place + words, own, mask=there < num_words)
    _publish(peers, rank, 0, number, SIZE, FLAGS)


@triton.jit  # type: ignore[untyped-decorator]
def _send_sums(
    x: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    at: tl.tensor,
    num_words: tl.tensor,
    limit_ns: tl.tensor,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
) -> None:
    """Step 2."""
    words = tl.arange(0, SHARE)
    here = at + rank * SHARE
    mask = here < num_words
    own = tl.load(x + here, mask=mask, other=0)
    low = tl.zeros([SHARE], tl.float32)
    high = tl.zeros([SHARE], tl.float32)
    for sender in tl.static_range(SIZE):
        part = own
        if sender != rank:
            _wait(_flag(peers, rank, 0, sender, FLAGS), number, limit_ns)
            place = _place(peers, rank, 0, sender, number, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
            part = tl.load(place + words, mask=mask, other=0, volatile=True)
        if tl.float32 == DTYPE:
            low += part.to(tl.float32, bitcast=True)
        else:
            low += low_of(part, DTYPE)
            high += high_of(part, DTYPE)
    total = low.to(tl.int32, bitcast=True) if tl.float32 == DTYPE else pair_of(low, high, DTYPE)
    tl.store(x + here, total, mask=mask)
    for distance in tl.static_range(1, SIZE):
        place = _place(peers, (rank + distance) % SIZE, 1, rank, number, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
        tl.store(place + words, total, mask=mask)
    _publish(peers, rank, 1, number, SIZE, FLAGS)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_sums(
    x: tl.tensor,
    peers: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    at: tl.tensor,
    num_words: tl.tensor,
    limit_ns: tl.tensor,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
) -> None:
    """Step 3."""
    words = tl.arange(0, SHARE)
    for distance in tl.static_range(1, SIZE):
        sender = (rank + distance) % SIZE
        there = at + sender * SHARE
        _wait(_flag(peers, rank, 1, sender, FLAGS), number, limit_ns)
        place = _place(peers, rank, 1, sender, number, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
        found = tl.load(place + words, mask=there < num_words, other=0, volatile=True)
        tl.store(x + there, found, mask=there < num_words)


@triton.jit(do_not_specialize=["rank", "num_vectors"])  # type: ignore[untyped-decorator]
def _sum(
    x: tl.tensor,
    peers: tl.tensor,
    numbers: tl.tensor,
    rank: tl.tensor,
    num_vectors: tl.tensor,
    limit_ns: tl.tensor,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
) -> None:
    """One program per chunk, in turns."""
    program = tl.program_id(0)
    step = tl.num_programs(0) * SIZE * SHARE
    num_words = 4 * num_vectors
    first = program * SIZE * SHARE
    count = tl.cdiv(num_words - first, step)
    at = first + tl.arange(0, SHARE)
    before = tl.load(numbers + program)
    for i in range(count + 2):
        number = before + i + 1
        if i < count:
            _send_addends(x, peers, rank, number, at + i * step, num_words, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
        if (i >= 1) & (i <= count):
            place = at + (i - 1) * step
            _send_sums(
                x, peers, rank, number - 1, place, num_words, limit_ns, DTYPE, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS
            )
        if i >= 2:
            place = at + (i - 2) * step
            _copy_sums(x, peers, rank, number - 2, place, num_words, limit_ns, SIZE, SHARE, PROGRAMS, SLOTS, FLAGS)
    tl.store(numbers + program, before + count)
