"""Checks that the Ray cluster does not accept connections without a token.

Anyone who can reach the ports of a Ray cluster can run code on all its nodes, unless it requires a token. So a cluster
that other machines can reach must require one, or the operator must accept the risk explicitly.
"""

from __future__ import annotations

import ipaddress

import grpc  # type: ignore[import-untyped]

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
