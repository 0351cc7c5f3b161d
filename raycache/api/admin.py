"""Operators' commands to the cache, from the bodies of POST /cache/...

    attach   {"url": "file:///var/cache/raycache", "size": "50GiB"}     resize   {"size": "20GiB"}
    detach   {}                                                         clear    {"tiers": ["host"]}; all without tiers
    flush    {"timeout_s": 60}; 30 without it                           inspect  the body of the request in question
    scrub    {"timeout_s": 60}; an hour without it

A command of inspect is a completion or a chat, so that its prompt is tokenised exactly as that request's would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from raycache.api.prepare import Generation
from raycache.api.schema import ChatBody, CompletionBody, StrictBody, parse_body
from raycache.config import parse_bytes
from raycache.errors import ConfigError, RequestError
from raycache.types import CacheAction, CacheCommand


def parse_command(action: CacheAction, body: Mapping[str, Any]) -> CacheCommand:
    """Read a command; INSPECT and STATUS have functions of their own.

    Raises:
        RequestError: names the field.
    """
    match action:
        case CacheAction.ATTACH:
            attach = parse_body(_AttachBody, body)
            return CacheCommand(action, url=attach.sized_url)
        case CacheAction.CLEAR:
            return CacheCommand(action, tiers=tuple(parse_body(_ClearBody, body).tiers))
        case CacheAction.RESIZE:
            return CacheCommand(action, size=parse_body(_ResizeBody, body).size)
        case CacheAction.FLUSH:
            return CacheCommand(action, timeout_s=parse_body(_FlushBody, body).timeout_s)
        case CacheAction.SCRUB:
            return CacheCommand(action, timeout_s=parse_body(_ScrubBody, body).timeout_s)
    parse_body(StrictBody, body)
    return CacheCommand(action)


def parse_inspected(body: Mapping[str, Any], *, model: str) -> CompletionBody | ChatBody:
    """Read the request in question; it is a chat if it has messages.

    Args:
        model: that is served, for a body without one.
    Raises:
        RequestError: names the field.
    """
    whole = {"model": model, **body}
    return parse_body(ChatBody, whole) if "messages" in body else parse_body(CompletionBody, whole)


def inspect_command(generation: Generation) -> CacheCommand:
    """The command to inspect the prompt of a request.

    Raises:
        RequestError: it has several.
    """
    firsts = [choice.request for choice in generation.choices if choice.is_first]
    if len(firsts) > 1:
        raise RequestError(f"only one prompt at a time can be inspected, got {len(firsts)}", field="prompt")
    return CacheCommand(CacheAction.INSPECT, prompt=tuple(firsts[0].prompt), cache_salt=firsts[0].cache_salt)


def _check_size(value: object) -> int:
    if type(value) is int and value > 0:
        return value
    if isinstance(value, str):
        try:
            return parse_bytes("size", value)
        except ConfigError:
            pass  # said below
    raise PydanticCustomError("size", 'must be a number of bytes or a size such as "50GiB"')


_Size = Annotated[int, PlainValidator(_check_size)]


class _AttachBody(StrictBody):
    url: str = Field(min_length=1)
    size: _Size | None = None

    @property
    def sized_url(self) -> str:
        if self.size is None:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}size={self.size}"

    def check(self) -> None:
        if self.size is not None and "size=" in self.url.partition("?")[2]:
            raise RequestError("the url already sets size; send only one of them", field="size")


class _ClearBody(StrictBody):
    tiers: list[Literal["device", "host", "storage"]] = Field(default=["device", "host", "storage"], min_length=1)


class _ResizeBody(StrictBody):
    size: _Size


class _FlushBody(StrictBody):
    timeout_s: float = Field(default=30.0, gt=0, le=86_400)


class _ScrubBody(StrictBody):
    timeout_s: float = Field(default=3600.0, gt=0, le=86_400)
