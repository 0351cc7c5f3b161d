"""The lab itself: what a fault does to a host, and that labs do not see each other."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import Lab, lab_of, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_of(2) as lab:
        yield lab


def reaches(lab: Lab, number: int) -> bool:
    look = lab.control.command(["timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{lab.address(number)}/22"])
    return subprocess.run(look, capture_output=True, timeout=20).returncode == 0


def test_hosts_have_a_name_an_address_and_files_of_their_own(lab: Lab) -> None:
    for number in range(2):
        lab.on(number, f"echo {number} | tee ~/mine /tmp/mine /dev/shm/mine > /dev/null")
    for number in range(2):
        assert lab.on(number, "hostname; cat ~/mine /tmp/mine /dev/shm/mine").split() == [
            f"h{number}",
            *3 * str(number),
        ]
        assert f"inet {lab.address(number)}/24" in lab.on(number, "ip -o addr")
    assert not Path("/tmp/mine").exists()


def test_a_cut_host_is_out_of_reach_until_it_is_healed(lab: Lab) -> None:
    lab.cut(1)
    assert reaches(lab, 0) and not reaches(lab, 1)
    lab.heal(1)
    assert reaches(lab, 1)


def test_a_frozen_host_does_nothing_until_it_thaws(lab: Lab) -> None:
    lab.on(1, "nohup bash -c 'while true; do date +%s%N > /tmp/clock; sleep 0.05; done' > /dev/null 2>&1 &")
    clock = lab.hosts[1].folder / "tmp" / "clock"
    deadline = time.monotonic() + 10
    while not clock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lab.hosts[1].freeze()
    before = clock.read_text()
    time.sleep(0.5)
    assert clock.read_text() == before
    lab.hosts[1].thaw()
    while clock.read_text() in (before, ""):
        assert time.monotonic() < deadline + 10
        time.sleep(0.05)


def test_a_slow_link_carries_what_it_is_told_to(lab: Lab) -> None:
    def seconds() -> float:
        begin = time.monotonic()
        lab.on(1, "head -c 200000 /dev/zero")
        return time.monotonic() - begin

    lab.slow(1, kilobytes_per_s=100)
    assert seconds() > 1.5
    lab.slow(1, kilobytes_per_s=0)


def test_a_killed_host_starts_again_with_its_home_alone(lab: Lab) -> None:
    lab.on(1, "touch ~/kept /tmp/lost /dev/shm/lost; nohup sleep 1000 > /dev/null 2>&1 &")
    inside = list(lab.hosts[1].processes())
    lab.hosts[1].kill()
    assert not any(process.is_running() for process in inside) and not reaches(lab, 1) and reaches(lab, 0)
    lab.start_host(1)
    assert lab.on(1, "ls ~/kept /tmp /dev/shm").split() == ["/root/kept", "/dev/shm:", "/tmp:", *_kept_in_tmp(lab)]


def test_two_labs_do_not_see_each_other(lab: Lab) -> None:
    with lab_of(1) as other:
        assert other.address(0) == lab.address(0)
        other.on(0, "touch ~/other")
        assert lab.on(0, "ls ~/other 2>/dev/null || echo none") == "none\n"
        assert not reaches(other, 1)


def _kept_in_tmp(lab: Lab) -> list[str]:
    """Folders of this machine's /tmp that hosts see, because Python or the lab lie there."""
    return sorted(path.name for path in (lab.hosts[1].folder / "tmp").iterdir())
