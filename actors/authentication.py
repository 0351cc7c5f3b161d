"""Ray's token: that clusters require one, and that its file is private.

Anyone who can reach the ports of a Ray cluster can run code on all its nodes, unless it requires a token. So a cluster
that other machines can reach must require one, or the operator must accept the risk explicitly.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import tempfile
from pathlib import Path

import grpc  # type: ignore[import-untyped]
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # its stub lacks it

from raycache.errors import ConfigError

_TIMEOUT_S = 10.0
_QUESTION = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
_REMEDY = (
    "make one with `ray get-auth-token --generate`, put it into ~/.ray/auth_token of every node and client, and start "
    "all with RAY_AUTH_MODE=token; or set --insecure-cluster if only trusted machines reach it"
)


def require_token(address: str, *, is_insecure_allowed: bool) -> None:
    """Reject a cluster that other machines can use without a token.

    Args:
        address: HOST:PORT of its GCS.
        is_insecure_allowed: accept it nevertheless.
    Raises:
        ConfigError: it requires no token, or that cannot be determined.
    """
    host = address.rpartition(":")[0].strip("[]")
    if is_insecure_allowed or _is_loopback(host):
        return
    match _answer_to_stranger(address):
        case grpc.StatusCode.UNAUTHENTICATED:
            return
        case grpc.StatusCode.OK:
            raise ConfigError(
                f"the Ray cluster at {address} runs code for anyone, since it requires no token; {_REMEDY}"
            )
        case other:
            raise ConfigError(
                f"the Ray cluster at {address} does not say whether it requires a token ({other}); {_REMEDY}"
            )


def keep_token_private() -> None:
    """Make the token's file readable by its owner only, creating it where Ray would, which lets everyone read it.

    A file that cannot be created or changed is left to Ray.
    """
    folder = Path.home() / ".ray"
    path = folder / "auth_token"
    with contextlib.suppress(OSError):
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(0o600)
    loader = AuthenticationTokenLoader.instance()
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".auth_token-") as file:  # of mode 0600
            file.write(secrets.token_hex(32))
            file.flush()
            os.link(file.name, path)  # unless another process was faster
    loader.reset_cache()


def _answer_to_stranger(address: str) -> grpc.StatusCode:
    """The cluster's response to a request without a token."""
    # Ignore a proxy from the environment: the cluster is on our own network.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as refusal:
            return refusal.code()
    return grpc.StatusCode.OK


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
