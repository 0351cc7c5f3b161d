"""Error messages for failed requests to the Hub and failed downloads."""

from __future__ import annotations

import errno
from pathlib import Path

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from raycache.checkpoint.hub_id import HubId
from raycache.errors import CheckpointError

FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, EntryNotFoundError, OSError, RuntimeError, ValueError, KeyError)
"""Errors of huggingface_hub. Its Rust downloader raises RuntimeError; responses of other servers cause the last two."""

_BUSY = (408, 429, 500, 502, 503, 504)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_away(cause: BaseException) -> bool:
    """Whether the Hub did not answer, so that a retry or the cache may help."""
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code in _BUSY
    return isinstance(cause, httpx2.TransportError | OfflineModeIsEnabled)


def is_transient(cause: BaseException) -> bool:
    """Whether a retry of a download that failed like this may succeed."""
    if isinstance(cause, HfHubHTTPError):
        return is_away(cause)
    if isinstance(cause, OfflineModeIsEnabled | LocalEntryNotFoundError):  # the latter after attempts of its own
        return False
    if isinstance(cause, OSError):
        return cause.errno is None  # with one, it is this machine's
    return isinstance(cause, httpx2.TransportError)


def refusal(cause: BaseException, model: HubId, *, endpoint: str, has_token: bool) -> CheckpointError:
    """The error for a model that could not be looked up.

    Args:
        cause: one of `FAILURES`.
        endpoint: URL of the Hub.
        has_token: whether the request had a token.
    """
    repo = model.repo
    login = "run `hf auth login` or set HF_TOKEN"
    match cause:
        case GatedRepoError():
            then = "your token does not have access yet" if has_token else f"then {login}"
            text = f"model {repo!r} is gated: accept its conditions at {endpoint}/{repo}; {then}"
        case HfHubHTTPError() if _is_unknown(cause, has_token=has_token):
            whose = "that the token which is set may read" if has_token else "that can be read without a token"
            then = "use a token that may" if has_token else login
            text = (
                f"model {repo!r} is neither a directory here nor a model on {endpoint} {whose}; check the name, and "
                f"for a private model {then}"
            )
        case RevisionNotFoundError():
            text = (
                f"model {repo!r} has no revision {model.revision!r}; use a branch, tag or commit of {endpoint}/{repo}"
            )
        case DisabledRepoError():
            text = f"model {repo!r} is disabled on {endpoint}; use another one"
        case OfflineModeIsEnabled():
            text = f"model {str(model)!r} is neither a directory nor in the cache, and HF_HUB_OFFLINE is set; unset it"
        case HfHubHTTPError():
            text = _refused_by_status(cause.response.status_code, repo, endpoint=endpoint, login=login)
        case httpx2.TransportError():
            text = (
                f"model {repo!r} is not a directory here, and {endpoint} cannot be reached ({_short(cause)}); check "
                "the name, the network and HF_ENDPOINT"
            )
        case HFValidationError():
            text = f"model {repo!r} is neither a directory here nor a name that the Hub allows; check it"
        case _:
            text = (
                f"model {repo!r}: {endpoint} did not answer like a Hugging Face Hub ({_short(cause)}); see HF_ENDPOINT"
            )
    return CheckpointError(text)


def broken(cause: BaseException, model: HubId, name: str, *, folder: Path) -> CheckpointError:
    """The error for a file that could not be downloaded.

    Args:
        cause: one of `FAILURES`.
        name: of the file.
        folder: of the cache.
    """
    what = f"{name} of {model.repo}"
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return CheckpointError(f"{what} does not fit into {folder}; free some space, or set HF_HOME to a larger disk")
    if isinstance(cause, OSError) and cause.errno is not None:
        return CheckpointError(f"{what} cannot be stored in {folder} ({cause.strerror}); set HF_HOME to another folder")
    text = f"{what} could not be downloaded ({_short(cause)})"
    if isinstance(cause, RuntimeError):  # after attempts of its own
        return CheckpointError(f"{text}; set HF_HUB_DISABLE_XET=1 to download over plain HTTP")
    return CheckpointError(f"{text}; try again, files that are whole are kept")


def _is_unknown(cause: HfHubHTTPError, *, has_token: bool) -> bool:
    """Whether the model does not exist for this user; without a token, the Hub then answers 401."""
    return isinstance(cause, RepositoryNotFoundError) or (cause.response.status_code == 401 and not has_token)


def _refused_by_status(status: int, repo: str, *, endpoint: str, login: str) -> str:
    match status:
        case 401:
            return f"{endpoint} does not take the token that is set; {login} with a valid one, or unset it"
        case 403:
            return f"model {repo!r} is forbidden by {endpoint} for the token that is set; use one with access"
        case _ if status in _BUSY:
            return f"{endpoint} answers {status} for model {repo!r}, which is not in the cache; try again later"
        case _:
            return f"{endpoint} answers {status} for model {repo!r}; check HF_ENDPOINT"


def _short(cause: BaseException) -> str:
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:200]}" if text else type(cause).__name__
