"""From a checked request body to the requests that the engine runs.

One HTTP request is a `Generation` of several choices: n for each of its prompts.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raycache.api.answer_grammar import chat_grammar, output_grammar
from raycache.api.chat import ChatTemplate
from raycache.api.chat_model import ChatModel
from raycache.api.defaults import Defaults
from raycache.api.formats.parts import PartsParser
from raycache.api.output_text import OutputText
from raycache.api.recent_chains import RecentChains
from raycache.api.repairs import Repairs
from raycache.api.schema import ChatBody, CompletionBody, GenerationBody
from raycache.api.tokenizer import Tokenizer
from raycache.cache.keys import Identity
from raycache.config import Config
from raycache.errors import PromptTooLongError, RequestError
from raycache.types import EngineInfo, GenerateRequest, SamplingParams

_RETENTION_S = {"in_memory": 600.0, "24h": 86400.0}


@dataclass(frozen=True)
class Choice:
    """One output that is asked for.

    Attributes:
        index: its place in the answer.
        is_first: first of the n choices of its prompt.
        request: for the engine.
        text: collects its output.
    """

    index: int
    is_first: bool
    request: GenerateRequest
    text: OutputText

    def cache_written(self, page_size: int) -> int:
        """Prompt tokens that were not in the cache, and are now as they fill whole pages.

        Args:
            page_size: tokens of a page; 0: prompts are not kept.
        """
        whole = len(self.request.prompt) // page_size * page_size if page_size else 0
        return max(0, whole - self.text.cached_tokens)


@dataclass(frozen=True)
class Generation:
    """One HTTP request, ready to run.

    Attributes:
        generation_id: such as "cmpl-...".
        model: name for the answer.
        choices: at least one.
        is_score_only: max_tokens=0: the prompt's log-probabilities are wanted and no output.
        created: seconds since the epoch.
        constrained_by: field that asks for the grammar of the outputs, or "".
        text: of a chat's prompt; "" for a completion.
        repairs: settings that have changed the messages or tools; `body` has them as they are then.
    """

    generation_id: str
    model: str
    choices: tuple[Choice, ...]
    body: CompletionBody | ChatBody
    is_score_only: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    constrained_by: str = ""
    text: str = ""
    repairs: tuple[str, ...] = ()

    @property
    def grammar(self) -> str:
        """Of all its outputs; "" for none."""
        return self.choices[0].request.sampling.grammar


@dataclass(frozen=True)
class Served:
    """What requests are prepared for.

    Attributes:
        tokenizer: of the model.
        chat: its template, and the format of its answers.
        info: limits of the engine.
        timeout_s: longest time that a request may take; None is no limit.
        defaults: of fields that a request does not set.
        has_priorities: whether cached tokens are evicted by priority.
        repairs: made in chats before they are rendered.
        chains: digests of the prompts prepared last.
    """

    tokenizer: Tokenizer
    chat: ChatModel
    info: EngineInfo
    timeout_s: float | None
    defaults: Defaults
    has_priorities: bool = False
    repairs: Repairs = field(default_factory=Repairs)
    chains: RecentChains = field(default_factory=RecentChains)

    @classmethod
    def of(cls, config: Config, *, tokenizer: Tokenizer, info: EngineInfo, defaults: Defaults) -> Served:
        """Those of a service.

        Raises:
            ConfigError: the chat template or a repair cannot be used.
        """
        template = ChatTemplate.load(tokenizer, path=config.chat_template)
        chat = ChatModel(template, tokenizer=tokenizer)
        timeout_s = None if config.request_timeout_s == "none" else config.request_timeout_s
        return cls(tokenizer, chat, info, timeout_s, defaults, config.eviction == "priority", Repairs.of(config))


def prepare_completion(body: CompletionBody, served: Served) -> Generation:
    """Tokenise the prompts of a /v1/completions request.

    Args:
        body: checked by parse_body.
        served: the model and its limits.
    Raises:
        RequestError: a value is out of range; names the field.
    """
    _check_count(len(body.prompt), body, info=served.info)
    encode, adds = served.tokenizer.encode, body.add_special_tokens
    prompts = [encode(p, add_special_tokens=adds) if isinstance(p, str) else p for p in body.prompt]
    grammar, constrained_by = output_grammar(body, served.tokenizer)
    is_score_only = body.max_tokens == 0
    wanted = 1 if is_score_only else body.max_tokens
    sampling = _Sampling(
        # A default was not asked for, so the context length may cut it.
        max_tokens=served.defaults.completion_tokens() if wanted is None else wanted,
        may_cut_max=body.max_tokens is None or served.defaults.cuts_max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
        grammar=grammar,
    )
    generation_id = f"cmpl-{uuid.uuid4().hex}"
    choices = _choices(generation_id, body, prompts, sampling, served=served, split=_Split(echo=body.echo))
    return Generation(generation_id, served.info.model, choices, body, is_score_only, constrained_by=constrained_by)


def prepare_chat(body: ChatBody, served: Served, *, cuts_max_tokens: bool = False) -> Generation:
    """Render and tokenise the messages of a /v1/chat/completions request.

    Args:
        body: checked by parse_body.
        served: the model and its limits.
        cuts_max_tokens: more than the context holds is no error.
    Raises:
        RequestError: a value is out of range, or the template refuses the messages.
    """
    body, repairs = served.repairs.applied(body)
    choice = body.choose_tools()
    text = served.chat.prompt(body, choice)
    prompt = served.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    grammar, constrained_by = chat_grammar(body, choice, model=served.chat, prompt=text, tokenizer=served.tokenizer)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = _Sampling(
        max_tokens=served.defaults.max_tokens if max_tokens is None else max_tokens,
        may_cut_max=max_tokens is None or cuts_max_tokens or served.defaults.cuts_max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    split = _Split(parser=served.chat.parser(body, choice, text), shown=served.chat.shown)
    generation_id = f"chatcmpl-{uuid.uuid4().hex}"
    choices = _choices(generation_id, body, [prompt], sampling, served=served, split=split)
    info = served.info
    return Generation(
        generation_id, info.model, choices, body, constrained_by=constrained_by, text=text, repairs=repairs
    )


def chat_prompt(body: ChatBody, served: Served) -> list[int]:
    """Token ids of a conversation in the chat template.

    Raises:
        RequestError: the template refuses the messages.
    """
    body, _ = served.repairs.applied(body)
    text = served.chat.prompt(body, body.choose_tools())
    return served.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)


@dataclass(frozen=True)
class _Sampling:
    """The settings that the two endpoints spell differently."""

    max_tokens: int | None
    may_cut_max: bool
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str


@dataclass(frozen=True)
class _Split:
    """How the text of an output is shown.

    Attributes:
        echo: it begins with the prompt.
        parser: makes what splits it into parts.
        shown: special tokens that the parser reads.
    """

    echo: bool = False
    parser: Callable[[], PartsParser] | None = None
    shown: frozenset[int] = frozenset()


def _choices(
    generation_id: str,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    sampling: _Sampling,
    *,
    served: Served,
    split: _Split,
) -> tuple[Choice, ...]:
    info = served.info
    _check_count(len(prompts), body, info=info)
    field_name = "prompt" if isinstance(body, CompletionBody) else "messages"
    arrays = [_ids(prompt, info=info, field_name=field_name) for prompt in prompts]
    for prompt in arrays:
        _check_length(prompt, sampling, info=info, field_name=field_name)
    priority, ttl_s = _retention(body, served)
    affinity = _affinity(body)
    chains = [_page_chain(prompt, served, cache_salt=body.cache_salt) for prompt in arrays]
    per_choice = [_sampling_params(body, sampling, number=number, served=served) for number in range(body.n)]
    choices = []
    for index in range(len(prompts) * body.n):
        prompt, params = arrays[index // body.n], per_choice[index % body.n]
        request = GenerateRequest(
            request_id=f"{generation_id}-{index}",
            prompt=prompt,
            sampling=params,
            priority=body.priority,
            timeout_s=min(filter(None, (body.timeout_s, served.timeout_s)), default=None),
            cache_salt=body.cache_salt,
            cache_priority=priority,
            cache_ttl_s=ttl_s,
            affinity=affinity,
            page_chain=chains[index // body.n],
        )
        text = OutputText(
            served.tokenizer,
            prompt=prompt,
            sampling=params,
            echo=split.echo,
            skip_special_tokens=body.skip_special_tokens,
            shown=split.shown,
            parser=split.parser() if split.parser else None,
        )
        choices.append(Choice(index, index % body.n == 0, request, text))
    return tuple(choices)


def _retention(body: GenerationBody, served: Served) -> tuple[int, float]:
    """Eviction priority and how long it holds, in seconds: the request's own, or what prompt_cache_retention hints."""
    ttl_s = _RETENTION_S.get(body.prompt_cache_retention)
    if ttl_s is None or not served.has_priorities or "cache_priority" in body.model_fields_set:
        return body.cache_priority, body.cache_ttl_s
    return 1, ttl_s


def _affinity(body: GenerationBody) -> str:
    """Of a prompt_cache_key, among those of its tenant; of fixed size."""
    if not body.prompt_cache_key:
        return ""
    text = f"{body.cache_salt}\0{body.prompt_cache_key}"
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def _check_count(num_prompts: int, body: GenerationBody, *, info: EngineInfo) -> None:
    if num_prompts * body.n > info.max_queue:
        raise RequestError(
            f"{num_prompts} prompts with n={body.n} are more choices than the queue takes (max_queue={info.max_queue})",
            field="prompt" if num_prompts > 1 else "n",
        )


def _ids(prompt: Sequence[int], *, info: EngineInfo, field_name: str) -> array[int]:
    """Token ids in a form that takes little space and time on their way to the engine."""
    if not prompt:
        raise RequestError(f"{field_name} must not be empty: it has no tokens", field=field_name)
    numbers = np.array(prompt)  # of Python's integers if one of them has more than 64 bits
    if numbers.min() < 0 or numbers.max() >= info.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < info.vocab_size)
        raise RequestError(
            f"{field_name} contains token id {wrong}; valid ids are in [0, {info.vocab_size})", field=field_name
        )
    return prompt if isinstance(prompt, array) else array("i", numbers.astype(np.int32).tobytes())


def _page_chain(prompt: array[int], served: Served, *, cache_salt: str) -> bytes:
    """Digests of a prompt's pages, made here rather than on the thread that plans steps."""
    info = served.info
    if not info.chained_weights:
        return b""
    identity = Identity(info.chained_weights, info.page_size, salt=cache_salt)
    return served.chains.page_chain(identity, prompt.tobytes())


def _check_length(prompt: Sequence[int], sampling: _Sampling, *, info: EngineInfo, field_name: str) -> None:
    limit, asked = info.max_model_len, sampling.max_tokens
    if len(prompt) >= limit:
        raise PromptTooLongError(
            f"This model's maximum context length is {limit} tokens, {field_name} has {len(prompt)} tokens, and one "
            "must be left for the output",
            field=field_name,
            num_tokens=len(prompt),
            limit=limit - 1,
        )
    if not sampling.may_cut_max and asked is not None and len(prompt) + asked > limit:
        raise PromptTooLongError(
            f"This model's maximum context length is {limit} tokens, and {len(prompt)} prompt tokens with "
            f"max_tokens={asked} exceed it; use max_tokens of at most {limit - len(prompt)}",
            field="max_tokens",
        )


def _sampling_params(body: GenerationBody, sampling: _Sampling, *, number: int, served: Served) -> SamplingParams:
    """Settings of choice `number` of n: choices with a seed differ, and the first is that of n=1."""
    info = served.info
    return SamplingParams(
        **served.defaults.sampling_of(body),
        seed=None if body.seed is None else (body.seed + number + 2**63) % 2**64 - 2**63,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={_bias_id(text, info): bias for text, bias in body.logit_bias.items()},
        stop=tuple(body.stop),
        stop_token_ids=tuple(_known_id("stop_token_ids", token_id, info) for token_id in body.stop_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
    )


def _bias_id(text: str, info: EngineInfo) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise RequestError(f"logit_bias must map token ids to numbers, got the key {text[:40]!r}", field="logit_bias")
    return _known_id("logit_bias", int(text), info)


def _known_id(name: str, token_id: int, info: EngineInfo) -> int:
    if not 0 <= token_id < info.vocab_size:
        raise RequestError(f"{name} contains token id {token_id}; valid ids are in [0, {info.vocab_size})", field=name)
    return token_id
