"""A command that runs on the head of a remote cluster, as a Ray job, followed from here.

Speaks with the dashboard's HTTP interface alone: this machine need not belong to the cluster.
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

_ANSWER_S = 20.0
"""For one answer of the dashboard."""
_AWAY_S = 120.0
"""That the dashboard may stay away while a job is followed."""
_SILENCE_S = 60.0
"""Without a line of the log, after which the connection is made anew: it may have died without a sign."""
_STOP_S = 90.0


class Job:
    """A job of a remote cluster.

    Args:
        address: of its dashboard, such as "http://127.0.0.1:8265".
        entrypoint: shell command, run on the head.
        environment: added to that of the command, and of all actors that it starts.
        stop_s: seconds that it may take to end cleanly when it is stopped.
    Raises:
        ConfigError: the cluster cannot be reached, or does not take the job.

    Attributes:
        job_id: by which `ray job` knows it.
    """

    def __init__(self, address: str, *, entrypoint: str, environment: Mapping[str, str], stop_s: int = 60) -> None:
        self._address = address
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it tells of every connection
        values = {**environment, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s)}
        try:
            self._client = _Client(address)
            self.job_id = str(self._client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": values}))
        except (*_FAILURES, ValueError, KeyError) as cause:  # the last two: an answer that is not that of a dashboard
            raise ConfigError(_explain(address, cause)) from cause

    def follow(self, show: Callable[[str], None]) -> None:
        """Show what it prints until it ends.

        Raises:
            ConfigError: the cluster does not answer any more.
        """
        asyncio.run(self._follow(show))

    async def _follow(self, show: Callable[[str], None]) -> None:
        seen, heard = 0, time.monotonic()
        while True:
            position = 0  # in the log: every connection tells all of it again
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
        """Of a job that has ended: the exit status of its command, or why it has none."""
        details: Any = self._ask(lambda: self._client.get_job_info(self.job_id))
        if details.driver_exit_code is not None:
            return int(details.driver_exit_code)
        return 0 if details.status == JobStatus.SUCCEEDED else str(details.message or details.status)

    def node(self) -> str:
        """Address of the node that it runs on; empty while that is not known."""
        details: Any = self._ask(lambda: self._client.get_job_info(self.job_id))
        return urlsplit(details.driver_agent_http_address or "").hostname or ""

    def stop(self) -> str:
        """End it and wait until it has ended, or for its deadline; what came of it, for people."""
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
    """Ray's client with a deadline for every answer: its own waits as long as the kernel does."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        answer: requests.Response = super()._do_request(method, endpoint, timeout=_ANSWER_S, **options)
        return answer


_FAILURES = (requests.RequestException, AuthenticationError, ConnectionError, RuntimeError)


def _explain(address: str, cause: BaseException) -> str:
    if isinstance(cause, AuthenticationError):
        return (
            f"the cluster at {address} wants its token; set RAY_AUTH_MODE=token and put the token that "
            "`ray get-auth-token` prints there into ~/.ray/auth_token here"
        )
    if isinstance(cause, requests.Timeout):
        return f"the Ray dashboard at {address} did not answer within {_ANSWER_S:.0f} s"
    if isinstance(cause, ConnectionError | requests.ConnectionError):
        return (
            f"nothing answers at {address}; a dashboard listens on its head's loopback unless told otherwise: "
            "`ray dashboard cluster.yaml` brings it to http://127.0.0.1:8265"
        )
    text = " ".join(str(cause).split())
    return f"what answers at {address} does not take jobs as a Ray dashboard does: {text[:300]}"
