"""Triton kernels that exchange small tensors between GPUs that reach each other's memory. Imported only where they run.

Each member writes its words into the memory of every member and reads what the others wrote into its own. A word of 4
bytes is stored together with the number of the exchange, 8 bytes at once, so it has arrived when its number is right:
no flag, fence or barrier follows the data. This is what NCCL calls its low-latency protocol.

    memory of a member    [parity of the number][program][sender][word]

Program i of a member exchanges with program i of the others and counts its exchanges by itself. Two halves in turn are
enough: who has received exchange k of all members knows that all have read exchange k - 1 to its end. Numbers start
again after 2^32 exchanges; only a word of that age could be mistaken for a new one.

Members must run the same exchanges of a group in the same order, never two at once. A kernel that waits for longer than
its limit traps, which ends all work of its process on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from raycache.parallel.devices import early
from raycache.parallel.peer_memory import PROGRAMS, WORDS, PeerMemory
from raycache.rounding import ceil_div

_WORD = torch.int32
_BLOCKS = (256, 512, 1024, 2048)
"""Words that a program exchanges at once."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Dtypes that can be summed, and Triton's names of them."""


def sum_parts(x: Tensor, memory: PeerMemory) -> None:
    """Replace x by its sum over members, added in float32 in rank order.

    Args:
        x: contiguous, of a dtype in DTYPES, aligned to 16 bytes and a multiple of them.
    """
    num_vectors = x.nbytes // 16
    block = _block(4 * num_vectors)
    _sum[(min(ceil_div(4 * num_vectors, block), PROGRAMS),)](
        x.view(-1).view(_WORD),
        memory.peers,
        memory.numbers,
        memory.rank,
        num_vectors,
        memory.limit_ns,
        DTYPE=DTYPES[x.dtype],
        **_sizes(memory, block),
    )


def exchange(x: Tensor, memory: PeerMemory, *, is_gather: bool, out: Tensor | None = None, num_rows: int = 1) -> Tensor:
    """Send parts of any dtype: x to all members, or x[i] to member i.

    Args:
        x: contiguous, aligned to 16 bytes, as is each part: [...] to be gathered, else [size, ...].
        out: where to write the result, contiguous and aligned to 16 bytes; None for a new tensor.
        num_rows: of each part; a row is a multiple of 16 bytes. The first rows of all members are written side by side,
            then their second rows, and so on.
    Returns:
        What each member sent: `out`, or a new tensor [size, ...].
    """
    if out is None:
        out = x.new_empty((memory.size, *x.shape) if is_gather else x.shape)
    num_vectors = out.nbytes // memory.size // 16
    block = _block(4 * num_vectors)
    _exchange[(min(ceil_div(4 * num_vectors, block), PROGRAMS),)](
        x.view(-1).view(_WORD),
        out.view(-1).view(_WORD),
        memory.peers,
        memory.numbers,
        memory.rank,
        num_vectors,
        0 if is_gather else num_vectors,
        num_vectors // num_rows,
        memory.limit_ns,
        **_sizes(memory, block),
    )
    return out


def _block(num_words: int) -> int:
    """As few words as keep the number of programs within PROGRAMS, so that many write at once."""
    return next((block for block in _BLOCKS if num_words <= block * PROGRAMS), _BLOCKS[-1])


def _sizes(memory: PeerMemory, block: int) -> dict[str, Any]:
    # Four words per thread: two stores of 16 bytes.
    sizes = {"SIZE": memory.size, "BLOCK": block, "PROGRAMS": PROGRAMS, "WORDS": WORDS}
    return sizes | {"num_warps": min(max(block // 128, 1), 16)} | early(memory.device)


@triton.jit  # type: ignore[untyped-decorator]
def send(
    words: tl.tensor,
    peers: tl.tensor,
    to: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Write words into the memory of one member.

    Args:
        number: of this program's exchange, which is one more than that of the exchange before.
        offsets: of the words, in the WORDS that the program has.
    """
    region = ((number & 1) * PROGRAMS + tl.program_id(0)) * SIZE + rank
    there = tl.multiple_of(tl.load(peers + to).to(tl.pointer_type(tl.int64)), 16) + region.to(tl.int64) * WORDS
    packed = (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(there + offsets, packed, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def receive(
    peers: tl.tensor,
    sender: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    limit_ns: tl.tensor,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """Wait for the words of one member."""
    region = ((number & 1) * PROGRAMS + tl.program_id(0)) * SIZE + sender
    here = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int64)), 16) + region.to(tl.int64) * WORDS
    packed = tl.load(here + offsets, mask=mask, other=0, volatile=True)
    start = globaltimer()
    while tl.max((mask & ((packed >> 32).to(tl.int32) != number)).to(tl.int32)) != 0:
        if globaltimer() - start > limit_ns:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
        packed = tl.load(here + offsets, mask=mask, other=0, volatile=True)
    return packed.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def low_of(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The first of two numbers of 2 bytes in each word, as float32."""
    return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def high_of(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The second one."""
    return ((words >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def pair_of(low: tl.tensor, high: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Two float32 numbers, rounded to DTYPE, in a word."""
    first = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    second = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    return first | (second << 16)


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
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per BLOCK words, in turns."""
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(numbers + program)
    for block in range(program, tl.cdiv(4 * num_vectors, BLOCK), tl.num_programs(0)):
        number += 1
        at = block * BLOCK + offsets
        mask = at < 4 * num_vectors
        own = tl.load(x + at, mask=mask, other=0)
        for step in tl.static_range(SIZE):
            send(own, peers, (rank + step) % SIZE, rank, number, offsets, mask, SIZE, PROGRAMS, WORDS)
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        for sender in tl.static_range(SIZE):
            words = receive(peers, sender, rank, number, offsets, mask, limit_ns, SIZE, PROGRAMS, WORDS)
            if tl.float32 == DTYPE:
                low += words.to(tl.float32, bitcast=True)
            else:
                low += low_of(words, DTYPE)
                high += high_of(words, DTYPE)
        if tl.float32 == DTYPE:
            tl.store(x + at, low.to(tl.int32, bitcast=True), mask=mask)
        else:
            tl.store(x + at, pair_of(low, high, DTYPE), mask=mask)
    tl.store(numbers + program, number)


@triton.jit(do_not_specialize=["rank", "num_vectors", "x_vectors", "row_vectors"])  # type: ignore[untyped-decorator]
def _exchange(
    x: tl.tensor,
    out: tl.tensor,
    peers: tl.tensor,
    numbers: tl.tensor,
    rank: tl.tensor,
    num_vectors: tl.tensor,
    x_vectors: tl.tensor,
    row_vectors: tl.tensor,
    limit_ns: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per BLOCK words of every part, in turns."""
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(numbers + program)
    for block in range(program, tl.cdiv(4 * num_vectors, BLOCK), tl.num_programs(0)):
        number += 1
        at = block * BLOCK + offsets
        mask = at < 4 * num_vectors
        row_words = 4 * row_vectors
        place = at // row_words * (row_words * SIZE) + at % row_words
        for step in tl.static_range(SIZE):
            to = (rank + step) % SIZE
            own = tl.load(x + to.to(tl.int64) * x_vectors * 4 + at, mask=mask, other=0)
            send(own, peers, to, rank, number, offsets, mask, SIZE, PROGRAMS, WORDS)
        for sender in tl.static_range(SIZE):
            words = receive(peers, sender, rank, number, offsets, mask, limit_ns, SIZE, PROGRAMS, WORDS)
            tl.store(out + sender * row_words + place, words, mask=mask)
    tl.store(numbers + program, number)
