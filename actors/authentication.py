"""Whether strangers can use the Ray cluster that a service is to run on.

Whoever reaches the ports of a Ray cluster can run any code on all its nodes, unless it asks for a token. So a cluster
that other machines can reach must ask for one, or the operator must say that it need not.
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
    """Refuse a cluster that answers strangers from other machines.

    Args:
        address: of its GCS, HOST:PORT.
        is_insecure_allowed: take it nevertheless.
    Raises:
        ConfigError: it asks for no token, or it cannot be found out whether it does.
    """
    host = address.rpartition(":")[0].strip("[]")
    if is_insecure_allowed or _is_loopback(host):
        return
    match _answer_to_stranger(address):
        case grpc.StatusCode.UNAUTHENTICATED:
            return
        case grpc.StatusCode.OK:
            raise ConfigError(
                f"the Ray cluster at {address} runs any code for everybody, it asks for no token; {_REMEDY}"
            )
        case other:
            raise ConfigError(
                f"the Ray cluster at {address} does not say whether it asks for a token ({other}); {_REMEDY}"
            )


def _answer_to_stranger(address: str) -> grpc.StatusCode:
    """What the cluster answers to a question without a token."""
    # A proxy from the environment is not for the cluster's own network.
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
