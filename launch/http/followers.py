"""What follows every generation of this process, and shows what it has seen."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route

from launch.http.achievable import AchievableApi
from launch.http.history import HistoryApi
from launch.http.streams import StreamsApi
from launch.http.why import WhyApi
from raycache.api.engine import AsyncEngine
from raycache.api.run import Follow
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.types import EngineInfo


class Followers:
    """The endpoints.

    Attributes:
        achievable: also has figures for /status and /metrics.
    """

    def __init__(self, engine: AsyncEngine, *, config: Config, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.achievable = AchievableApi(engine, config=config, info=info)
        self._why = WhyApi(config, tokenizer=tokenizer, page_size=info.page_size)
        self._streams = StreamsApi(engine, config=config, model=info.model)
        self._history = HistoryApi(engine, config=config, lost=self._why.lost)

    def routes(self) -> list[Route]:
        """Routes for the application."""
        apis = (self._why, self.achievable, self._streams, self._history)
        return [route for api in apis for route in api.routes()]

    def of(self, request: Request) -> list[Follow]:
        """What follows the generation of an HTTP request."""
        self._history.keep()
        found = (self._streams.follow(request), self._why.compare(request), self.achievable.follow(request))
        return [each for each in found if each is not None]
