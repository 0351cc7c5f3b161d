"""In-process use: `LLM(model).generate(prompts)`. The same engine as the server, without Ray."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from types import TracebackType
from typing import Any

import torch

from raycache.api.chat import ChatTemplate
from raycache.api.defaults import Defaults
from raycache.api.output_text import OutputText
from raycache.api.tokenizer import Tokenizer
from raycache.checkpoint.hub_models import fetch, located, pinned
from raycache.checkpoint.hub_progress import ProgressBar
from raycache.config import Config
from raycache.decider.engine import Engine, Executor
from raycache.deployment.deployment import Deployment, deploy
from raycache.deployment.weights import with_weights_form
from raycache.errors import ConfigError, EngineStoppedError, RankLostError, RequestError, RequestFailedError
from raycache.gang.build import build_engine
from raycache.gang.executors import LocalExecutor
from raycache.gang.processes import ProcessGang, end_if_imported_by_rank
from raycache.host.commands import STORAGE_FIRST, carry_out, is_for_storage, with_storage
from raycache.host.directory import SHARED_MEMORY, new_name
from raycache.host.link import HostLink
from raycache.host.nodes import open_all
from raycache.host.service import HostService
from raycache.observe.kv_events import check_installed
from raycache.parallel.devices import GpuModel
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.rank.rank import Rank
from raycache.types import (
    CacheAction,
    CacheCommand,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Miss,
    SamplingParams,
    TokenLogprob,
)

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_SETTLE_TIMEOUT_S = 60.0
"""Longest wait for page moves between tiers before an operator's command."""


@dataclass(frozen=True)
class Completion:
    """The output for one prompt.

    Attributes:
        text: output without special tokens, cut before a stop string.
        token_ids: generated tokens, including a final stop token.
        finish_reason: why generation ended.
        prompt_token_ids: the prompt's token ids.
        cached_tokens: prompt tokens reused from the cache.
        cached_by_tier: cached_tokens by tier.
        miss: why the rest of the prompt was not reused.
        cut_by: component, such as "state", whose missing rows prevented more reuse, or "".
        logprobs: one per token, if requested.
        prompt_logprobs: one per prompt token (None for the first), if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cut_by: str = ""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    miss: Miss = Miss.NONE


class LLM:
    """A model in this process, or in worker processes if tp, pp or cp is above 1.

    Scripts that split the model need the usual `if __name__ == "__main__":` guard of multiprocessing.

    Args:
        model: directory of a Hugging Face model, or its name on the Hub, such as "Qwen/Qwen3-8B".
        settings: fields of `Config`, such as tp=2 or num_pages=512.
    Raises:
        ConfigError: a setting is invalid, the model's directory cannot be served, or the guard is missing.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # The caller waits for all prompts anyway: no queue limit by default.
        wanted = pinned(Config.from_mapping({"model": str(model), "max_queue": 2**31 - 1, **settings}))
        if wanted.world_size > 1:
            end_if_imported_by_rank()
        if wanted.event_address is not None:
            check_installed()
        with ProgressBar() as bar:
            fetch(wanted, on_progress=bar.show)
        self.config = located(wanted)
        defaults = Defaults.of(self.config)
        device_type = self.config.device
        if device_type == "auto":
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        deployment = deploy(self.config, device_type=device_type)
        self.config = deployment.config
        self.tokenizer = Tokenizer.of(self.config, vocab_size=deployment.model.vocab_size)
        self._sampling = SamplingParams(**defaults.sampling)
        self._host: HostService | None = None
        self._rank: Rank | None = None
        self._gang: ProcessGang | None = None
        try:
            self._engine, self._executor = self._start(deployment)
        except BaseException:  # an interrupt, too: processes and host memory would stay
            if self._gang is not None:
                self._gang.kill()
            self._close_host()
            raise
        self._ids = itertools.count()
        self._is_closed = False

    def _start(self, deployment: Deployment) -> tuple[Engine, Executor]:
        host = self._open_host(deployment) if self.config.has_host_tier else None
        arena = None if host is None else host.path
        executor: Executor
        if self.config.world_size == 1:
            member = alone(device="cuda:0" if deployment.device_type == "cuda" else "cpu")
            if deployment.device_type == "cuda":
                deployment = with_weights_form(deployment, [GpuModel.of(member.ctx.device)])
            loaded = load(deployment, member)
            num_pages = loaded.measure()
            self._rank = loaded.build(num_pages, arena)
            executor = LocalExecutor(self._rank, member.board, plans_ahead=deployment.plans_ahead)
        else:
            self._gang = ProcessGang(deployment, arenas=[] if arena is None else [arena])
            deployment, num_pages, executor = self._gang.deployment, self._gang.num_pages, self._gang.executor
        engine = build_engine(executor, deployment, num_pages=num_pages, host=host, compiles_at_once=True)
        return engine, executor

    @property
    def engine(self) -> Engine:
        """The engine, to add requests and run single steps."""
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """The model and the limits of the engine."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """Counters of the engine, and current use of its pools."""
        return self._engine.stats()

    def check(self) -> None:
        """Check that no page, slot or lock has leaked; for tests."""
        self._engine.check()

    def cache(self, command: CacheCommand) -> dict[str, Any]:
        """Run an operator's command on the tiers of the cache.

        Waits briefly for page moves between tiers first, so that a cleared tier stays empty.

        Args:
            command: such as CacheCommand(CacheAction.CLEAR, tiers=("device",)).
        Returns:
            The result as plain values: the JSON of the HTTP API's `POST /cache/...`.
        Raises:
            ConfigError: the command is not possible.
            RequestError: the prompt to inspect has no tokens, or ids outside the vocabulary.
            RankLostError: a rank of a split model died.
            EngineStoppedError: the model is closed.
        """
        if self._is_closed:
            raise EngineStoppedError("this LLM is closed; create a new one")
        self._settle()
        done = self._command_storage(command) if command.kind in STORAGE_FIRST else {}
        answer = self._engine.admin(command)
        while not answer.done():
            self._engine.step()
        done |= answer.result()
        if command.kind not in STORAGE_FIRST:
            done |= self._command_storage(command)
        if command.kind is CacheAction.STATUS and self._host is not None:
            done["tiers"] = with_storage(done["tiers"], self._host.status())
        return done

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate completions for prompts, all in one batch.

        Args:
            prompts: texts or token ids, as lists, tuples or arrays.
            sampling: parameters for all prompts, or one per prompt; default: as
                `generation_config` says.
        Returns:
            One completion per prompt, in order.
        Raises:
            RequestError: a prompt or its sampling parameters are invalid; nothing was run.
            RequestFailedError: a grammar became too complex on the way.
            RankLostError: a rank of a split model died.
            EngineStoppedError: the model is closed.
        """
        if self._is_closed:
            raise EngineStoppedError("this LLM is closed; create a new one")
        each = [sampling or self._sampling] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} sampling parameters", field="sampling")
        if isinstance(prompts, str) or any(isinstance(prompt, Number) for prompt in prompts):
            raise RequestError("generate takes a list of prompts; wrap a single prompt in a list", field="prompt")
        by_id: dict[str, _Run] = {}
        try:
            for prompt, params in zip(prompts, each, strict=True):
                self._add(prompt, params, by_id)
            self._run(by_id)
        except (RequestError, RequestFailedError, RankLostError):
            raise
        except BaseException:  # an interrupt can come in the middle of a step
            self._abandon_step()
            raise
        finally:
            # After an error nothing of this call may stay queued.
            for request_id in by_id:
                self._engine.cancel(request_id)
        return [run.completion() for run in by_id.values()]

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Generate replies to conversations.

        Args:
            conversations: lists of messages with "role" and "content"; or one such list.
            sampling: parameters for all conversations.
        Returns:
            One completion per conversation, in order.
        Raises:
            RequestError: the model has no chat template, or a conversation is malformed or rejected by the template.
        """
        template = ChatTemplate.load(self.tokenizer, path=self.config.chat_template)
        single = [each for each in conversations if isinstance(each, Mapping)]
        chats = [each for each in conversations if not isinstance(each, Mapping)]
        if single and chats:
            raise RequestError("chat takes one list of messages, or a list of such lists", field="messages")
        prompts = [
            self.tokenizer.encode(template.render(messages), add_special_tokens=False)
            for messages in ([single] if single else chats)
        ]
        return self.generate(prompts, sampling)

    def close(self) -> None:
        """Stop the ranks. A closed model accepts no more prompts."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._engine.close()
        except RankLostError as error:
            _log.warning("ranks were gone before the end: %s", error)
            if self._gang is not None:
                self._gang.kill()
        if self._gang is not None:
            self._gang.join(_CLOSE_TIMEOUT_S)
        self._close_host()

    def _close_host(self) -> None:
        if self._rank is not None:
            self._rank.close()  # before the memory that it moves to goes
        if self._host is not None:
            self._host.close()

    def _open_host(self, deployment: Deployment) -> HostLink:
        """Create a host tier, whose memory is freed with this process."""
        self._host = service = HostService(SHARED_MEMORY / new_name())
        (opened,) = open_all([service], deployment, epoch=0)
        return HostLink(opened.path, opened.spec.sizes, service.work, has_storage=bool(opened.spec.storage))

    def _settle(self) -> None:
        """Wait for page moves between tiers, unless requests are running."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._engine.has_work and not self._engine.has_requests and time.monotonic() < deadline:
            self._engine.step()

    def _command_storage(self, command: CacheCommand) -> dict[str, Any]:
        if not is_for_storage(command):
            return {}
        if self._host is not None:
            return carry_out(command, self._host)
        if command.kind is CacheAction.CLEAR:
            return {}
        raise ConfigError(f"{command.kind} needs a host tier, but there is none; set host_memory")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._gang is not None:
            self._gang.kill()
            self._close_host()
        else:
            self.close()

    def _abandon_step(self) -> None:
        """Recover from an interrupted step: restart a local rank with an empty cache; the ranks of a gang are lost."""
        if self._gang is None:
            self._executor.close()
            self._engine.restart(self._executor)
        else:
            self._gang.kill()

    def _add(self, prompt: str | Sequence[int], sampling: SamplingParams, by_id: dict[str, _Run]) -> None:
        ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt)
        request_id = f"llm-{next(self._ids)}"
        self._engine.add(GenerateRequest(request_id, ids, sampling))
        # Only now: the engine has checked the ids.
        ids = tuple(map(int, ids))  # those of numpy are integers of another kind
        text = OutputText(self.tokenizer, prompt=ids, sampling=sampling)
        by_id[request_id] = _Run(ids, text, [], [], [], [])

    def _run(self, by_id: Mapping[str, _Run]) -> None:
        while any(run.text.finish_reason is None for run in by_id.values()):
            for output in self._engine.step():
                # Requests of an earlier call that failed may still end in this one.
                run = by_id.get(output.request_id)
                if run is None or run.text.finish_reason is not None:
                    continue
                if output.finish_reason is FinishReason.ERROR:
                    raise RequestFailedError(output.error or "the engine failed while it ran a request")
                delta = run.text.push(output)
                run.pieces.append(delta.text)
                run.token_ids += delta.token_ids
                run.logprobs += [entry.logprob for entry in delta.entries if entry.logprob is not None]
                run.prompt_logprobs += delta.prompt_logprobs or ()
                if delta.finish_reason is not None and output.finish_reason is None:
                    self._engine.cancel(output.request_id)


@dataclass
class _Run:
    """A prompt in progress."""

    prompt: tuple[int, ...]
    text: OutputText
    pieces: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]

    def completion(self) -> Completion:
        assert self.text.finish_reason is not None, "only a finished run has a completion"
        return Completion(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.text.finish_reason,
            prompt_token_ids=self.prompt,
            cached_tokens=self.text.cached_tokens,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            cut_by=self.text.cut_by,
            cached_by_tier=self.text.cached_by_tier,
            miss=self.text.miss,
        )
