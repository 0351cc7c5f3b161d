"""What front ends and engines send each other, as bytes: msgpack, in which a map with one negative key stands for a
value of another kind.

    {-1: [item, ...]}                                   tuple
    {-2: [class, number of a field, its value, ...]}    dataclass, without fields that have their default
    {-3: [class, value]}                                StrEnum
    {-4: [class, args, attributes]}                     error
    {-5: columns}                                       tuple of TokenLogprob: a prompt of 65,536 tokens has as many
    {-6: [request id, tokens, value, ...]}              increment of tokens only: there is one per stream and step
    extension 1                                         array of int32, as it is in memory

A class is its number below. Nothing that comes can name code to run: there are no other classes.
"""

from __future__ import annotations

import dataclasses
import numbers
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain, islice
from typing import Any

import msgpack

from actors.answers import ActorLostError
from raycache import errors
from raycache.errors import RayCacheError
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams, TokenLogprob

_TUPLE, _RECORD, _ENUM, _ERROR, _LOGPROBS, _TOKENS = -1, -2, -3, -4, -5, -6
_ARRAY = 1

_RECORDS: tuple[type[Any], ...] = (RequestOutput, GenerateRequest, SamplingParams)
_ENUMS: tuple[type[StrEnum], ...] = (FinishReason, Miss)
_ERRORS: tuple[type[RayCacheError], ...] = (
    *sorted(
        (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RayCacheError)),
        key=lambda each: each.__name__,
    ),
    ActorLostError,
)
_FIELDS = [[(field.name, field.default) for field in dataclasses.fields(each)] for each in _RECORDS]
_RECORD_NUMBERS, _ENUM_NUMBERS, _ERROR_NUMBERS = (
    {each: number for number, each in enumerate(classes)} for classes in (_RECORDS, _ENUMS, _ERRORS)
)
_SURROGATES = "surrogatepass"
"""JSON can have half a character in a string."""
_BUFFER_BYTES = 16 * 1024
"""At first; msgpack's own default takes longer to allocate than most messages to pack."""


def pack(message: Any) -> bytes:
    """A message of plain values, lists and mappings of them, and the classes of this file.

    Raises:
        TypeError: anything else is in it.
    """
    packed: bytes = msgpack.packb(
        message, default=_plain, strict_types=True, unicode_errors=_SURROGATES, buf_size=_BUFFER_BYTES
    )
    return packed


def unpack(packed: bytes) -> Any:
    """The message that was packed; errors of a class that is not known here come as one that it derives from.

    Raises:
        ValueError: it is none.
    """
    return msgpack.unpackb(
        packed, object_hook=_from_map, ext_hook=_from_extension, strict_map_key=False, unicode_errors=_SURROGATES
    )


def _plain(value: Any) -> Any:
    """What stands for a value that msgpack does not know."""
    kind = type(value)
    if kind is RequestOutput and _has_only_tokens(value):
        return {_TOKENS: _plain_tokens(value)}
    if (number := _RECORD_NUMBERS.get(kind)) is not None:
        record: list[Any] = [number]
        for at, (name, default) in enumerate(_FIELDS[number]):
            if (of_field := getattr(value, name)) is not default:
                record += (at, of_field)
        return {_RECORD: record}
    if kind is tuple:
        if value and type(value[-1]) is TokenLogprob:
            return {_LOGPROBS: _columns(value)}
        return {_TUPLE: list(value)}
    if kind is array and value.typecode == "i":
        return msgpack.ExtType(_ARRAY, value.tobytes())
    if (number := _ENUM_NUMBERS.get(kind)) is not None:
        return {_ENUM: [number, value.value]}
    if isinstance(value, RayCacheError):
        known = next(each for each in kind.__mro__ if each in _ERROR_NUMBERS)
        attributes = {name: _text(each) for name, each in vars(value).items()}
        return {_ERROR: [_ERROR_NUMBERS[known], list(map(_text, value.args)), attributes]}
    match value:
        case Mapping():
            return dict(value)
        case numbers.Integral():  # numpy's
            return int(value)
        case numbers.Real():
            return float(value)
    raise TypeError(f"{kind.__name__} is no part of a message")


def _has_only_tokens(output: RequestOutput) -> bool:
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.error is None
    )


def _plain_tokens(output: RequestOutput) -> list[Any]:
    return [
        output.request_id,
        list(output.token_ids),
        output.cached_tokens,
        output.cut_by,
        dict(output.cached_by_tier),
        output.miss.value,
        output.queued_s,
        output.num_starts,
        output.drafted_tokens,
        output.accepted_tokens,
    ]


def _tokens(
    request_id: str,
    token_ids: list[int],
    cached_len: int,
    cut_by: str,
    by_tier: dict[str, int],
    miss: str,
    *numbers: Any,
) -> RequestOutput:
    told = (cached_len, cut_by, by_tier, Miss(miss), *numbers)
    return RequestOutput(request_id, tuple(token_ids), None, None, None, *told)


def _from_map(found: dict[Any, Any]) -> Any:
    if len(found) != 1:
        return found
    ((key, parts),) = found.items()
    if key == _TUPLE:
        return tuple(parts)
    if key == _TOKENS:
        return _tokens(*parts)
    if key == _RECORD:
        names = _FIELDS[parts[0]]
        return _RECORDS[parts[0]](**{names[at][0]: each for at, each in zip(parts[1::2], parts[2::2], strict=True)})
    if key == _ENUM:
        return _ENUMS[parts[0]](parts[1])
    if key == _LOGPROBS:
        return _logprobs(*parts)
    if key == _ERROR:
        number, args, attributes = parts
        error = _ERRORS[number].__new__(_ERRORS[number])
        error.args = tuple(args)
        vars(error).update(attributes)
        return error
    return found


def _from_extension(code: int, data: bytes) -> array[int]:
    if code != _ARRAY:
        raise ValueError(f"there is no extension {code}")
    found = array("i")
    found.frombytes(data)
    return found


def _columns(logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
    known = [each for each in logprobs if each is not None]
    top = list(chain.from_iterable(each.top for each in known))
    return [
        len(logprobs) - len(known),  # a prompt's first token has none
        [each.token_id for each in known],
        [each.logprob for each in known],
        [len(each.top) for each in known],
        [token_id for token_id, _ in top],
        [logprob for _, logprob in top],
    ]


def _logprobs(
    num_none: int,
    token_ids: list[int],
    logprobs: list[float],
    lens: list[int],
    top_ids: list[int],
    top_logprobs: list[float],
) -> tuple[TokenLogprob | None, ...]:
    top = zip(top_ids, top_logprobs, strict=True)
    known = [
        TokenLogprob(token_id, logprob, tuple(islice(top, count)))
        for token_id, logprob, count in zip(token_ids, logprobs, lens, strict=True)
    ]
    return (*[None] * num_none, *known)


def _text(value: Any) -> Any:
    """A part of an error, as text if it is of no plain type."""
    return value if isinstance(value, str | int | float | None) else str(value)
