"""By which address a process is reached by ranks on other nodes: one network for gloo, NCCL and the meeting point."""

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
    """How others reach this process.

    Attributes:
        host: address.
        interface: that has it, such as "eth1"; empty if none of this machine has.
        network: what all processes have in common that share a loopback interface, and no others.
    """

    host: str
    interface: str
    network: str

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same network stack reach it."""
        try:
            return _address(self.host).is_loopback
        except ValueError:  # Ray was started with a host name
            return False

    @property
    def nccl_interface(self) -> str:
        """For NCCL_SOCKET_IFNAME: this one and no other, or NCCL would listen where it likes best; empty for any."""
        return f"={self.interface}" if self.interface else ""


def link(setting: str, *, node_address: str, table: Mapping[str, Sequence[str]] | None = None) -> Link:
    """Choose this process's address.

    Args:
        setting: name of an interface, or a subnet such as 10.0.0.0/16; empty for Ray's choice.
        node_address: by which Ray reaches this node; preferred where several addresses suit.
        table: addresses per interface that is up; None for those of this machine.
    Raises:
        ConfigError: no interface suits; lists those that there are.
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
            f"interface={setting!r} suits no address of the node {socket.gethostname()} ({node_address}), which has "
            f"{there or 'none'}; name one that every node has, or a subnet such as 10.0.0.0/16"
        )
    # Where addresses of both kinds are there, IPv4 works with every piece of software on the way.
    name, host = min(found, key=lambda one: (one[1] != node_address, ":" in one[1]))
    return Link(host, name, network_id())


def addresses() -> dict[str, list[str]]:
    """Addresses per interface of this machine that is up, without those that hold on one cable only."""
    stats = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        hosts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        # An IPv6 address of the link has its interface behind a "%".
        hosts = [host for host in hosts if "%" not in host and not _address(host).is_link_local]
        if hosts and name in stats and stats[name].isup:
            found[name] = hosts
    return found


def network_id() -> str:
    """The same for two processes if and only if one reaches the other by a loopback address."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # no Linux: no namespaces either
        return socket.gethostname()


def require_reachable(links: Mapping[str, Link]) -> None:
    """Refuse addresses that others cannot reach.

    Args:
        links: of the members of a gang, by what messages call them.
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
        raise ConfigError(f"interface={text!r} is no subnet: {cause}; write one such as 10.0.0.0/16") from cause


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)
