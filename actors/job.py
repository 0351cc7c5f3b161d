"""Runs a command on the head of a remote cluster as a Ray job, and follows its log.

Uses only the dashboard's HTTP API: this machine need not belong to the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from raycache.errors import ConfigError

_RESPONSE_S = 20.0
"""For one response of the dashboard."""
_AWAY_S = 120.0
"""How long the dashboard may be unreachable while a job is followed."""
_SILENCE_S = 60.0
"""Time without log output after which to reconnect: the connection may have died silently."""
_STOP_S = 90.0


class Job:
    """A job on a remote cluster, submitted by the constructor.

    Args:
        address: URL of the dashboard, such as "http://127.0.0.1:8265".
        entrypoint: shell command, run on the head.
        environment: environment variables for the command and all actors it starts.
        stop_s: grace period in seconds when the job is stopped.
    Raises:
        ConfigError: the cluster cannot be reached, or rejects the job.
    Attributes:
        job_id: as in `ray job status`.
    """

    def __init__(self, address: str, *, entrypoint: str, environment: Mapping[str, str], stop_s: int = 60) -> None:
        self._address = address
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # logs every connection
        values = {**environment, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s)}
        try:
            self._client = _Client(address)
            self.job_id = str(self._client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": values}))
        except (*_FAILURES, ValueError, KeyError) as cause:  # the last two: not a dashboard's response
            raise ConfigError(_explain(address, cause)) from cause

    def follow(self, show: Callable[[str], None]) -> None:
        """Pass the job's output to `show` until the job ends.

        Raises:
            ConfigError: the dashboard has been unreachable for too long.
        """
        asyncio.run(self._follow(show))

    async def _follow(self, show: Callable[[str], None]) -> None:
        seen, heard = 0, time.monotonic()
        while True:
            position = 0  # in the log: every connection starts from its beginning
            try:
                tail = self._client.tail_job_logs(self.job_id)
                while True:
                    text = await asyncio.wait_for(anext(tail), _SILENCE_S)
                    show(text[max(0, seen - position) :])
                    position += len(text)
                    seen = max(seen, position)
            except (StopAsyncIteration, TimeoutError, aiohttp.ClientError, *_FAILURES):
                pass
            try:
                if self._client.get_job_status(self.job_id).is_terminal():
                    return
                heard = time.monotonic()
            except _FAILURES as cause:
                if time.monotonic() - heard > _AWAY_S:
                    raise ConfigError(
                        f"{self._address} has not answered for {_AWAY_S:.0f} s; the job {self.job_id} may still run: "
                        f"`ray job status {self.job_id}`"
                    ) from cause
            await asyncio.sleep(1.0)

    def exit_status(self) -> int | str:
        """Exit status of the command of an ended job, or the reason why there is none."""
        details: Any = self._ask(lambda: self._client.get_job_info(self.job_id))
        if details.driver_exit_code is not None:
            return int(details.driver_exit_code)
        return 0 if details.status == JobStatus.SUCCEEDED else str(details.message or details.status)

    def node(self) -> str:
        """Address of the node that the job runs on; empty while unknown."""
        details: Any = self._ask(lambda: self._client.get_job_info(self.job_id))
        return urlsplit(details.driver_agent_http_address or "").hostname or ""

    def stop(self) -> str:
        """Stop the job and wait for its end, up to a timeout; returns the outcome as a sentence."""
        try:
            self._client.stop_job(self.job_id)
            deadline = time.monotonic() + _STOP_S
            while not (status := self._client.get_job_status(self.job_id)).is_terminal():
                if time.monotonic() > deadline:
                    return (
                        f"the job {self.job_id} did not end within {_STOP_S:.0f} s; see `ray job status {self.job_id}`"
                    )
                time.sleep(0.5)
        except _FAILURES as cause:
            return f"{_explain(self._address, cause)}; to stop the job: ray job stop {self.job_id}"
        return f"the job {self.job_id} is {status.lower()}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except _FAILURES as cause:
            raise ConfigError(_explain(self._address, cause)) from cause


class _Client(JobSubmissionClient):
    """Ray's client with a timeout for every response; it has none of its own."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        response: requests.Response = super()._do_request(method, endpoint, timeout=_RESPONSE_S, **options)
        return response


_FAILURES = (requests.RequestException, AuthenticationError, ConnectionError, RuntimeError)


def _explain(address: str, cause: BaseException) -> str:
    if isinstance(cause, AuthenticationError):
        return (
            f"the cluster at {address} requires a token; set RAY_AUTH_MODE=token and copy the output of "
            "`ray get-auth-token` there to ~/.ray/auth_token here"
        )
    if isinstance(cause, requests.Timeout):
        return f"the Ray dashboard at {address} did not respond within {_RESPONSE_S:.0f} s"
    if isinstance(cause, ConnectionError | requests.ConnectionError):
        return (
            f"nothing listens at {address}; by default a dashboard listens on the head's loopback interface only: "
            "`ray dashboard cluster.yaml` forwards it to http://127.0.0.1:8265"
        )
    text = " ".join(str(cause).split())
    return f"{address} does not accept jobs like a Ray dashboard: {text[:300]}"
