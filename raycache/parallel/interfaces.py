"""Chooses the address by which ranks on other nodes reach this process, for gloo, NCCL and the rendezvous store."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from raycache.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """How other processes reach this one.

    Attributes:
        host: address.
        interface: its interface, such as "eth1"; empty if no interface of this machine has the address.
        network: see `network_id`.
    """

    host: str
    interface: str
    network: str

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on the same network stack can reach it."""
        try:
            return _address(self.host).is_loopback
        except ValueError:  # Ray was started with a host name
            return False

    @property
    def nccl_interface(self) -> str:
        """Value of NCCL_SOCKET_IFNAME that selects exactly this interface; empty for any."""
        return f"={self.interface}" if self.interface else ""


def link(setting: str, *, node_address: str, table: Mapping[str, Sequence[str]] | None = None) -> Link:
    """Choose this process's address.

    Args:
        setting: name of an interface, or a subnet such as 10.0.0.0/16; empty for Ray's choice.
        node_address: by which Ray reaches this node; preferred if several addresses match.
        table: addresses per interface that is up; by default those of this machine.
    Raises:
        ConfigError: no address matches; the message lists all.
    """
    table = addresses() if table is None else table
    if not setting:
        name = next((name for name, hosts in table.items() if node_address in hosts), "")
        return Link(node_address, name, network_id())
    if "/" in setting:
        wanted = _subnet(setting)
        found = [(name, host) for name, hosts in table.items() for host in hosts if _address(host) in wanted]
    else:
        found = [(setting, host) for host in table.get(setting, ())]
    if not found:
        there = ", ".join(f"{name} ({', '.join(hosts)})" for name, hosts in table.items())
        raise ConfigError(
            f"interface={setting!r} matches no address of the node {socket.gethostname()} ({node_address}), which has "
            f"{there or 'none'}; name one that every node has, or a subnet such as 10.0.0.0/16"
        )
    # IPv4 is preferred, since all software supports it.
    name, host = min(found, key=lambda one: (one[1] != node_address, ":" in one[1]))
    return Link(host, name, network_id())


def addresses() -> dict[str, list[str]]:
    """Addresses per interface of this machine that is up, without link-local ones."""
    stats = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        hosts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        # Link-local IPv6 addresses have their interface after a "%".
        hosts = [host for host in hosts if "%" not in host and not _address(host).is_link_local]
        if hosts and name in stats and stats[name].isup:
            found[name] = hosts
    return found


def network_id() -> str:
    """Identifies the network stack: equal for two processes exactly if they share loopback addresses."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux, so no namespaces
        return socket.gethostname()


def require_reachable(links: Mapping[str, Link]) -> None:
    """Check that the members of a gang can reach each other.

    Args:
        links: by the members' names in messages.
    Raises:
        ConfigError: they are on several machines and one has a loopback address.
    """
    if len({one.network for one in links.values()}) == 1:
        return
    for name, one in links.items():
        if one.is_loopback:
            raise ConfigError(
                f"{name} is reached by {one.host}, which leads nowhere from other nodes, and the ranks are on several; "
                "start Ray there with `ray start --node-ip-address=ADDRESS`, or set interface to a network that all "
                "nodes have"
            )


def _subnet(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as cause:
        raise ConfigError(f"interface={text!r} is not a subnet: {cause}; write one such as 10.0.0.0/16") from cause


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)
