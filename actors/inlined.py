"""A request as arguments of a call of the hub actor that travel with the call.

Ray puts an argument above 100 KiB into its object store, and the actor waits until it has fetched it: two milliseconds
for a prompt of 65,536 tokens. Several smaller arguments stay in the message, up to 10 MiB of them. They are bytes,
which Ray does not pickle.

    rest, parts = inlined(request)       parts, joined: number of tokens (8 B), prompt (4 B each), page_chain
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from raycache.types import GenerateRequest

_PART_BYTES = 90_000  # below Ray's `max_direct_call_object_size`
_COUNT_BYTES = 8


def inlined(request: GenerateRequest) -> tuple[GenerateRequest, list[bytes]]:
    """A request without its prompt and page_chain, and these in parts; a short one as it is, without parts."""
    prompt, chain = request.prompt, request.page_chain
    if not isinstance(prompt, array) or len(prompt) * prompt.itemsize + len(chain) < _PART_BYTES:
        return request, []
    packed = len(prompt).to_bytes(_COUNT_BYTES, "little") + prompt.tobytes() + chain
    parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
    return replace(request, prompt=(), page_chain=b""), parts


def joined(rest: GenerateRequest, parts: Sequence[bytes]) -> GenerateRequest:
    """The request that was given to `inlined`."""
    if not parts:
        return rest
    packed, prompt = b"".join(parts), array("i")
    end = _COUNT_BYTES + int.from_bytes(packed[:_COUNT_BYTES], "little") * prompt.itemsize
    prompt.frombytes(packed[_COUNT_BYTES:end])
    return replace(rest, prompt=prompt, page_chain=packed[end:])
