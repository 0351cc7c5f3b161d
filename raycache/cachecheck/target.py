"""What is known about the server: its APIs, what they show, and how a prompt can be asked without its cache."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raycache.cachecheck.answers import Answer, Question
from raycache.cachecheck.client import CannotTestError, Client, RefusedError
from raycache.cachecheck.text import Writer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FLUSHES = ("/reset_prefix_cache", "/flush_cache", "/cache/clear")
"""Of vLLM, SGLang and RayCache."""

_OFF = {"cache_prompt": False}
"""Field of llama.cpp's server: the whole prompt is computed."""

_TOP = 5
_MAX_RECORDS = 400
_UNKNOWN_FIELD = "cachecheck_unknown_field"


class Cold(enum.StrEnum):
    """A way to ask a prompt without what is cached."""

    SALT = "salt"
    OFF = "off"
    FLUSH = "flush"
    LINE = "line"


@dataclass(frozen=True)
class Target:
    """A server, as far as it told.

    Attributes:
        model: name in requests.
        path: API that text prompts are sent to.
        forms: path -> fields that ask it for log-probabilities; a path that is absent does not work.
        cold: how a prompt is asked without the cache.
        flush: path that empties the cache, if `cold` is that.
        shows_cached: whether `usage` has the number of cached tokens.
        has_salts: whether `cache_salt` is a field that this server promises to honour.
        tool_choice: sent with tools; "auto" where that works, as with "none" some servers leave tools out of prompts.
            Empty: it takes no tools.
        has_drafts: whether `usage` has draft tokens.
        context: longest prompt and output together, tokens; 0: not told.
        tokens_per_record: of the prompts that are sent.
        notes: for the report.
    """

    model: str
    path: str = COMPLETIONS
    forms: Mapping[str, Mapping[str, Any]] | None = None
    cold: Cold = Cold.LINE
    flush: str = ""
    shows_cached: bool = False
    has_salts: bool = False
    tool_choice: str = ""
    has_drafts: bool = False
    context: int = 0
    tokens_per_record: float = 20.0
    notes: tuple[str, ...] = ()

    def request(self, question: Question, *, line: str, salt: str, is_off: bool = False) -> tuple[str, dict[str, Any]]:
        """Path and body of a request for greedy tokens.

        Args:
            line: first line of the prompt.
            salt: empty: none.
            is_off: whether the request turns the cache off.
        """
        path = CHAT if question.is_chat else self.path
        text = f"{line} is the topic.\n{question.text}"
        body: dict[str, Any] = {"model": self.model, "max_tokens": question.output_tokens, "temperature": 0}
        if path == COMPLETIONS:
            body["prompt"] = text
        elif question.is_chat:
            body["messages"] = [{"role": "system", "content": text}, *question.messages]
        else:
            body["messages"] = [{"role": "user", "content": text}]
        if question.tools:
            body |= {"tools": list(question.tools), "tool_choice": self.tool_choice}
        if salt:
            body["cache_salt"] = salt
        if is_off:
            body |= _OFF
        return path, body | dict((self.forms or {}).get(path, {}))


class Probe:
    """Finds out about a server, with about ten requests.

    Args:
        model: empty: the first that the server lists.
        wanted: how to ask cold; None: the first of salt, off and line that works.
        has_salts: whether `cache_salt` must be honoured; None: if the server shows that it knows the field.
    """

    def __init__(
        self, client: Client, writer: Writer, *, model: str, wanted: Cold | None, has_salts: bool | None
    ) -> None:
        self._client, self._writer = client, writer
        self._model, self._wanted, self._has_salts = model, wanted, has_salts

    async def run(self, *, prompt_tokens: int) -> Target:
        """Ask the server.

        Args:
            prompt_tokens: aimed at for a usual prompt; the writer is set to it.
        Raises:
            CannotTestError: no API works, or no way to be cold does.
        """
        target = await self._named()
        target = await self._formed(target)
        target = await self._sized(target, prompt_tokens=prompt_tokens)
        target = await self._repeated(target)
        target = await self._salted(target)
        return await self._chatting(await self._made_cold(target))

    async def _named(self) -> Target:
        listed = await self._client.get("/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        entries = [one for one in models or () if isinstance(one, dict) and "id" in one]
        if not self._model and not entries:
            raise CannotTestError("the server lists no model at /v1/models; name it with --model")
        name = self._model or str(entries[0]["id"])
        entry = next((one for one in entries if one["id"] == name), {})
        # Of vLLM and RayCache; others; one slot of llama.cpp's server.
        context = entry.get("max_model_len") or entry.get("context_length") or (entry.get("meta") or {}).get("n_ctx")
        return Target(name, context=int(context or 0))

    async def _formed(self, target: Target) -> Target:
        """Find the APIs, and how they are asked for log-probabilities."""
        question = self._writer.question(3)
        forms: dict[str, Mapping[str, Any]] = {}
        reason = ""
        chats: list[Mapping[str, Any]] = [{"logprobs": True, "top_logprobs": _TOP}, {"logprobs": True}, {}]
        texts: list[Mapping[str, Any]] = [{"logprobs": _TOP}, {"logprobs": 1}, {}]
        for path, ways in ((COMPLETIONS, texts), (CHAT, chats)):
            for form in ways:
                tried = replace(target, path=path, forms={path: form})
                try:
                    answer = await self.ask(tried, question)
                except RefusedError as refusal:
                    reason = str(refusal)
                    continue
                if form and not any(token.logprob is not None for token in answer.tokens):
                    continue
                forms[path] = form
                break
        if not forms:
            raise CannotTestError(f"neither {COMPLETIONS} nor {CHAT} works: {reason}")
        # Log-probabilities matter more than a prompt without a template around it.
        path = next((path for path in forms if forms[path]), next(iter(forms)))
        return replace(target, path=path, forms=forms)

    async def _sized(self, target: Target, *, prompt_tokens: int) -> Target:
        """Set the length of prompts."""
        few, many = self._writer.question(3), self._writer.question(13)
        counts = [(await self.ask(target, question)).prompt_tokens for question in (few, many)]
        if counts[0] is not None and counts[1] is not None and counts[1] > counts[0]:
            target = replace(target, tokens_per_record=(counts[1] - counts[0]) / 10)
        most = prompt_tokens
        if target.context:
            most = min(prompt_tokens, max(8, (target.context - 2 * self._writer.output_tokens) // 6))
        self._writer.num_records = max(3, min(_MAX_RECORDS, round(most / target.tokens_per_record)))
        return target

    async def _repeated(self, target: Target) -> Target:
        """Whether hits are reported, with longer prompts if there are none."""
        for _ in range(3):
            question = self._writer.question(self._writer.num_records)
            await self.ask(target, question)
            again = await self.ask(target, question)
            if again.cached_tokens:
                return replace(target, shows_cached=True)
            longer = 2 * self._writer.num_records
            if again.cached_tokens is None or 0 < target.context < 6 * longer * target.tokens_per_record:
                break
            self._writer.num_records = min(longer, _MAX_RECORDS)
        if again.cached_tokens is None:
            note = (
                "the server does not tell how many tokens were cached (vLLM does with --enable-prompt-tokens-details), "
                "so repeated prompts are taken for hits"
            )
            return replace(target, notes=(*target.notes, note))
        raise CannotTestError(
            f"a repeated prompt of {again.prompt_tokens} tokens had no cached tokens: the server has no prefix cache, "
            "or longer pages; try --prompt-tokens with a larger number"
        )

    async def _salted(self, target: Target) -> Target:
        """Whether the server promises to honour salts."""
        if self._has_salts is not None:
            return replace(target, has_salts=self._has_salts)
        described = await self._client.get("/openapi.json")
        if described is not None and "cache_salt" in str(described):
            return replace(target, has_salts=True)
        question = self._writer.question(3)
        if await self._takes(target, question, {_UNKNOWN_FIELD: "x"}):
            return target
        return replace(target, has_salts=await self._takes(target, question, {"cache_salt": "x"}))

    async def _made_cold(self, target: Target) -> Target:
        """Choose a way to be cold that works."""
        if self._wanted in (None, Cold.SALT):
            if await self._salts_work(target):
                return replace(target, cold=Cold.SALT)
            if self._wanted is Cold.SALT:
                raise CannotTestError("--cold salt: the server does not honour cache_salt; try --cold line")
        if self._wanted in (None, Cold.OFF):
            if await self._off_works(target):
                return replace(target, cold=Cold.OFF)
            if self._wanted is Cold.OFF:
                raise CannotTestError("--cold off: cache_prompt does not turn the cache off; try --cold line")
        if self._wanted is Cold.FLUSH:
            question = self._writer.question(self._writer.num_records)
            for path in FLUSHES:
                await self.ask(target, question)
                if await self._client.command(path) and not (await self.ask(target, question)).cached_tokens:
                    return replace(target, cold=Cold.FLUSH, flush=path)
            raise CannotTestError(f"--cold flush: none of {', '.join(FLUSHES)} emptied the cache; try --cold line")
        note = "prompts are made cold by their first line, so only larger differences can be told from noise"
        return replace(target, cold=Cold.LINE, notes=(*target.notes, note))

    async def _salts_work(self, target: Target) -> bool:
        """Whether a new salt gives no hits, and the same salt does."""
        if not target.has_salts:
            return False
        if not target.shows_cached:
            return True
        question, salt = self._writer.question(self._writer.num_records), self._writer.unique()
        await self.ask(target, question)
        try:
            first, second = [await self.ask(target, question, salt=salt) for _ in range(2)]
        except RefusedError:
            return False
        return not first.cached_tokens and bool(second.cached_tokens)

    async def _off_works(self, target: Target) -> bool:
        """Whether a repeated prompt has cached tokens, and none if the request turns the cache off."""
        if not target.shows_cached:
            return False
        question = self._writer.question(self._writer.num_records)
        path, body = target.request(question, line=question.topic, salt="", is_off=True)
        try:
            await self.ask(target, question)
            off = await self._client.ask(path, body)
        except RefusedError:
            return False
        return not off.cached_tokens and bool((await self.ask(target, question)).cached_tokens)

    async def _chatting(self, target: Target) -> Target:
        """Whether chats with tools work, and draft tokens are shown."""
        if CHAT in (target.forms or {}):
            messages = ({"role": "user", "content": "Hello"},)
            question = Question(self._writer.unique(), "", messages, self._writer.tools())
            for choice in ("auto", "none"):
                tried = replace(target, tool_choice=choice)
                try:
                    await self.ask(tried, question)
                except RefusedError as refusal:
                    note = f"tools with tool_choice {choice!r} are refused: {refusal}"
                    target = replace(target, notes=(*target.notes, note))
                else:
                    target = tried
                    break
        drafted = await self.ask(target, self._writer.pattern())
        return replace(target, has_drafts=drafted.drafted_tokens > 0)

    async def ask(self, target: Target, question: Question, *, salt: str = "") -> Answer:
        """Ask as it is."""
        return await self._client.ask(*target.request(question, line=question.topic, salt=salt))

    async def _takes(self, target: Target, question: Question, fields: Mapping[str, Any]) -> bool:
        path, body = target.request(question, line=question.topic, salt="")
        try:
            await self._client.ask(path, {**body, **fields})
        except RefusedError:
            return False
        return True
