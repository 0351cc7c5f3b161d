"""What front ends and engines send each other, as bytes: msgpack with extensions for the classes below.

    tuple       [item, ...]
    array       int32, as they are in memory
    dataclass   [number of the class, number of a field, its value, ...]    without fields that have their default
    StrEnum     [number of the class, value]
    error       [number of the class, args, attributes]
    logprobs    a tuple of TokenLogprob as columns, since a prompt of 65,536 tokens has as many:
                [number of None before them, token ids, logprobs, lengths of top, token ids in them, logprobs in them]

Nothing that comes can name code to run: there are no other classes.
"""

from __future__ import annotations

import dataclasses
import numbers
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import chain, islice
from typing import Any

import msgpack

from actors.answers import ActorLostError
from raycache import errors
from raycache.errors import RayCacheError
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams, TokenLogprob


class _Code(IntEnum):
    """Codes of extensions."""

    TUPLE = 0
    ARRAY = 1
    RECORD = 2
    ENUM = 3
    ERROR = 4
    LOGPROBS = 5


_RECORDS: tuple[type[Any], ...] = (RequestOutput, GenerateRequest, SamplingParams)
_ENUMS: tuple[type[StrEnum], ...] = (FinishReason, Miss)
_ERRORS: tuple[type[RayCacheError], ...] = (
    *sorted(
        (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RayCacheError)),
        key=lambda each: each.__name__,
    ),
    ActorLostError,
)
_SURROGATES = "surrogatepass"
"""JSON can have half a character in a string."""
_FIELDS = [[(field.name, field.default) for field in dataclasses.fields(each)] for each in _RECORDS]
_NUMBER = {each: number for classes in (_RECORDS, _ENUMS, _ERRORS) for number, each in enumerate(classes)}
"""Of each class, among those of its kind."""


def pack(message: Any) -> bytes:
    """A message of plain values, lists and mappings of them, and the classes of this file.

    Raises:
        TypeError: anything else is in it.
    """
    packed: bytes = msgpack.packb(message, default=_extension, strict_types=True, unicode_errors=_SURROGATES)
    return packed


def unpack(packed: bytes) -> Any:
    """The message that was packed; errors of a class that is not known here come as one that it derives from.

    Raises:
        ValueError: it is none.
    """
    return msgpack.unpackb(packed, ext_hook=_from_extension, strict_map_key=False, unicode_errors=_SURROGATES)


def _extension(value: Any) -> Any:
    number = _NUMBER.get(type(value))
    match value:
        case (*_, TokenLogprob()):
            return msgpack.ExtType(_Code.LOGPROBS, pack(_columns(value)))
        case tuple():
            return msgpack.ExtType(_Code.TUPLE, pack(list(value)))
        case StrEnum() if number is not None:
            return msgpack.ExtType(_Code.ENUM, pack([number, value.value]))
        case array(typecode="i"):
            return msgpack.ExtType(_Code.ARRAY, value.tobytes())
        case RayCacheError():
            known = next(each for each in type(value).__mro__ if each in _NUMBER)
            attributes = {name: _plain(each) for name, each in vars(value).items()}
            return msgpack.ExtType(
                _Code.ERROR, pack([_NUMBER[known], [_plain(each) for each in value.args], attributes])
            )
        case Mapping():
            return dict(value)
        case numbers.Integral():  # numpy's
            return int(value)
        case numbers.Real():
            return float(value)
    if number is None:
        raise TypeError(f"{type(value).__name__} is no part of a message")
    record: list[Any] = [number]
    for at, (name, default) in enumerate(_FIELDS[number]):
        if (of_field := getattr(value, name)) is not default:
            record += (at, of_field)
    return msgpack.ExtType(_Code.RECORD, pack(record))


def _from_extension(code: int, packed: bytes) -> Any:
    if code == _Code.ARRAY:
        found = array("i")
        found.frombytes(packed)
        return found
    parts = unpack(packed)
    match code:
        case _Code.TUPLE:
            return tuple(parts)
        case _Code.RECORD:
            names = _FIELDS[parts[0]]
            return _RECORDS[parts[0]](**{names[at][0]: each for at, each in zip(parts[1::2], parts[2::2], strict=True)})
        case _Code.ENUM:
            return _ENUMS[parts[0]](parts[1])
        case _Code.LOGPROBS:
            return _logprobs(*parts)
        case _Code.ERROR:
            number, args, attributes = parts
            error = _ERRORS[number].__new__(_ERRORS[number])
            error.args = tuple(args)
            vars(error).update(attributes)
            return error
    raise ValueError(f"there is no extension {code}")


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


def _plain(value: Any) -> Any:
    """A part of an error, as text if it is of no plain type."""
    return value if isinstance(value, str | int | float | None) else str(value)
