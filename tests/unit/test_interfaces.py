"""By which address a rank is reached, on machines with several."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from raycache.errors import ConfigError
from raycache.parallel import interfaces
from raycache.parallel.context import DECIDER, Store, build_group, group_handles
from raycache.parallel.interfaces import Link, addresses, link, network_id, require_reachable
from raycache.parallel.sharding import Split

TABLE = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.7", "fd00:1::7"],
    "eth1": ["fd00:2::7", "10.1.0.8", "10.1.0.7"],
    "ib0": ["fd00:3::7"],
}


@pytest.mark.parametrize(
    ("setting", "node_address", "host", "interface"),
    [
        ("", "10.0.0.7", "10.0.0.7", "eth0"),
        ("", "10.1.0.7", "10.1.0.7", "eth1"),
        ("", "203.0.113.1", "203.0.113.1", ""),  # translated on the way
        ("eth1", "10.0.0.7", "10.1.0.8", "eth1"),
        ("eth1", "10.1.0.7", "10.1.0.7", "eth1"),  # of two, the one that Ray knows
        ("ib0", "10.0.0.7", "fd00:3::7", "ib0"),
        ("10.1.0.0/16", "10.0.0.7", "10.1.0.8", "eth1"),
        ("10.1.0.7/32", "10.0.0.7", "10.1.0.7", "eth1"),
        ("10.0.0.0/8", "10.1.0.7", "10.1.0.7", "eth1"),
        ("fd00:1::/64", "10.0.0.7", "fd00:1::7", "eth0"),
        ("127.0.0.0/8", "10.0.0.7", "127.0.0.1", "lo"),
    ],
)
def test_the_setting_names_an_interface_or_a_subnet(setting: str, node_address: str, host: str, interface: str) -> None:
    found = link(setting, node_address=node_address, table=TABLE)
    assert (found.host, found.interface) == (host, interface)
    assert found.is_loopback == (interface == "lo")
    assert found.nccl_interface == (f"={interface}" if interface else "")


@pytest.mark.parametrize("setting", ["eth7", "192.168.0.0/24"])
def test_what_suits_no_address_is_refused_with_those_that_there_are(setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        link(setting, node_address="10.0.0.7", table=TABLE)
    assert "eth0 (10.0.0.7, fd00:1::7)" in str(refusal.value) and socket.gethostname() in str(refusal.value)


def test_a_subnet_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a subnet.*write one such as 10.0.0.0/16"):
        link("10.0.0.0/99", node_address="10.0.0.7", table=TABLE)


def test_interfaces_of_a_psutil_table_that_are_down_or_of_one_cable_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(family: int, address: str) -> object:
        return SimpleNamespace(family=family, address=address)

    up, down = SimpleNamespace(isup=True), SimpleNamespace(isup=False)
    four, six, cable = socket.AF_INET, socket.AF_INET6, socket.AF_PACKET
    table = {
        "eth0": [entry(cable, "02:00:00:00:00:01"), entry(six, "fe80::1%eth0"), entry(four, "10.0.0.7")],
        "eth1": [entry(four, "10.1.0.7")],
        "eth2": [entry(six, "fe80::2%eth2")],
        "eth3": [entry(four, "169.254.3.3"), entry(six, "fd00::3")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": up, "eth1": down, "eth2": up, "eth3": up})
    assert addresses() == {"eth0": ["10.0.0.7"], "eth3": ["fd00::3"]}


def test_this_machine_has_a_loopback_interface() -> None:
    name = next(name for name, hosts in addresses().items() if "127.0.0.1" in hosts)
    assert link(name, node_address="203.0.113.1").host == "127.0.0.1"


def test_loopback_addresses_are_refused_on_several_machines_only() -> None:
    here, there = Link("127.0.0.1", "lo", "a"), Link("10.0.0.2", "eth0", "b")
    require_reachable({"rank 0": here, "rank 1": here})
    require_reachable({"rank 0": there, "rank 1": Link("10.0.0.3", "eth0", "a")})
    with pytest.raises(ConfigError, match=r"^rank 1 is reached by 127.0.0.1.*--node-ip-address"):
        require_reachable({"rank 0": there, "rank 1": here})
    with pytest.raises(ConfigError, match="rank 0 is reached by ::1"):
        require_reachable({"rank 0": Link("::1", "lo", "a"), "rank 1": there})


def ask_network(*command: str) -> str:
    code = "from raycache.parallel.interfaces import network_id; print(network_id())"
    return subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_processes_of_one_network_stack_know_it() -> None:
    assert ask_network() == network_id()


def test_a_network_namespace_is_another_network() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "true"], timeout=60).returncode:
        pytest.skip("this user cannot make network namespaces")
    assert ask_network("unshare", "--net") != network_id()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_group_meets_over_ipv6() -> None:
    import threading

    import torch

    store = Store("::1")
    handle = group_handles(Split(), backend="gloo", store=store.address, epoch=1, timeout_s=20)["control"]
    heard: list[int] = []

    def member(number: int, value: int) -> None:
        group = build_group(handle, member=number, epoch=1, host="::1", device=torch.device("cpu"))
        tensor = torch.tensor([value])
        group.broadcast(tensor, root=0)
        heard.append(int(tensor))

    threads = [threading.Thread(target=member, args=pair) for pair in ((DECIDER, 5), (0, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert heard == [5, 5]
    assert interfaces.link("", node_address="::1").is_loopback
