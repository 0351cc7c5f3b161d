"""GET /cache/why: why prompts were computed again, summed up for each tenant.

A tenant sees its own sums, a key with the right "admin" those of all. Of texts, the sums have no more than the names of
header-like lines and tools; what stands on both sides is in the answer to the request itself, with `return_cache_info`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, tenant_of
from launch.http.keys import ADMIN
from launch.http.wire import ProblemError, json_response
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.api.run import Follow
from raycache.api.schema import ChatBody
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config, parse_bytes
from raycache.divergence.history import PromptHistory, Watch
from raycache.divergence.place import Asked
from raycache.divergence.text import TokenText

WHY_PATH = "/cache/why"


class WhyApi:
    """The endpoint, and the comparison of the prompts of this process."""

    def __init__(self, config: Config, *, tokenizer: Tokenizer, page_size: int) -> None:
        self._config = config
        self._history: PromptHistory | None = None
        if config.prefix_cache and config.prompt_history != "none":
            vocabulary = tokenizer.vocabulary
            text = TokenText(vocabulary.pieces.__getitem__, size=vocabulary.size, is_special=tokenizer.is_special)
            max_bytes = parse_bytes("prompt_history", config.prompt_history)
            self._history = PromptHistory(text, page_size=page_size, max_bytes=max_bytes)

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route(WHY_PATH, self.show)]

    async def show(self, request: Request) -> Response:
        """Return the sums."""
        check_operator(request, self._config)
        if self._history is None:
            text = "the server keeps no history of prompts: it runs without prefix cache or with --prompt-history none"
            raise ProblemError(Problem(404, text))
        tenant = tenant_of(request)
        if ADMIN not in tenant.rights:
            return json_response({"tenants": self._history.sums.facts(tenant.name)})
        return json_response({"history_bytes": self._history.seen.num_bytes, "tenants": self._history.sums.facts()})

    def lost(self) -> dict[str, dict[str, int]]:
        """Tenant -> cause -> prompt tokens that were computed again, since the start."""
        return {} if self._history is None else self._history.sums.lost()

    def compare(self, request: Request) -> Follow | None:
        """What compares the prompts of an HTTP request; None: they are not compared."""
        history, tenant = self._history, tenant_of(request).name
        if history is None:
            return None

        def begin(generation: Generation, choice: Choice) -> Watch | None:
            if not choice.is_first:
                return None
            sent = choice.request
            choice.text.comparison = history.begin(
                sent.prompt,
                salt=sent.cache_salt,
                tenant=tenant,
                asked=_asked(generation, choice),
                ttl_s=sent.cache_ttl_s,
                is_wanted=generation.body.return_cache_info,
                chain=sent.page_chain,
            )
            return choice.text.comparison

        return begin


def _asked(generation: Generation, choice: Choice) -> Asked:
    body = generation.body
    if isinstance(body, ChatBody):
        return Asked(body.messages, body.tools, generation.text)
    prompt = body.prompt[choice.index // body.n]
    return Asked(text=prompt if isinstance(prompt, str) else "")
