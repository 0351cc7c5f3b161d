"""Operator endpoints: GET /replicas, and POST /replicas/{scale,restart}.

They require the same rights as cache commands. The response is sent when the command has completed, which can take as
long as starting ranks; a command is completed even if its client disconnects.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator
from launch.http.wire import ProblemError, json_response, read_body
from raycache.api.problem import Problem
from raycache.api.replicas import ReplicaAction, ReplicaCommand, ReplicaSet, parse_replica_command
from raycache.api.schema import parse_json
from raycache.config import Config, parse_bytes
from raycache.errors import ConfigError, RequestError


class ReplicasApi:
    """The endpoints."""

    def __init__(self, replicas: ReplicaSet, *, config: Config) -> None:
        self._replicas = replicas
        self._config = config
        self._max_body = parse_bytes("max_body", config.max_body)

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route("/replicas", self.status), Route("/replicas/{action}", self.carry_out, methods=["POST"])]

    async def status(self, request: Request) -> Response:
        """Return the replicas and their load."""
        return json_response(dict(await self._replicas.carry_out(ReplicaCommand(ReplicaAction.STATUS))))

    async def carry_out(self, request: Request) -> Response:
        """Carry out a command and return its result."""
        action = _action(request.path_params["action"])
        check_operator(request, self._config)
        raw = await read_body(request, limit=self._max_body, may_be_empty=True)
        command = parse_replica_command(action, parse_json(raw or b"{}"))
        try:
            return json_response(dict(await self._replicas.carry_out(command)))
        except ConfigError as refusal:
            raise RequestError(str(refusal)) from refusal


def _action(name: str) -> ReplicaAction:
    known = [action for action in ReplicaAction if action is not ReplicaAction.STATUS]
    if name not in known:
        raise ProblemError(Problem(404, f"unknown replicas command {name!r}; use one of {', '.join(known)}"))
    return ReplicaAction(name)
