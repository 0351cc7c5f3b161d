"""One host of a lab: a set of Linux namespaces, held by its first process.

It has a network, processes, mounts, a name, shared memory, a home and a /tmp of its own. All of it lives as long as its
first process, which the kernel ends with ours: nothing has to be cleaned up but a folder.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
NAMESPACES = ("--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc")
_START_S = 20.0
_SHARED_MEMORY = "4g"
_INIT = """\
set -eu
name=$1 space=$2 home=$3; shift 3
hostname "$name"
mount -t tmpfs -o size=$SHARED_MEMORY tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir /run/sshd
mount --bind "$space/hosts" /etc/hosts
while [ "$1" != -- ]; do mkdir -p "$space/$1/$3"; mount --bind "$2/$3" "$space/$1/$3"; shift 3; done
shift
ip link set lo up
: > "$space/is_up"
mount --rbind "$space/home" "$home"
mount --rbind "$space/tmp" /tmp
"$@" & wait
"""
"""The first process. It stays bash, which buries processes that lost their parents."""


class Space:
    """Namespaces of one host.

    Args:
        name: of the host.
        folder: for its files; made if needed. All hosts see the one that it lies in.
        environment: of commands that are run in it.
    """

    def __init__(self, name: str, *, folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.folder = name, folder
        self._environment = environment

    @property
    def pid(self) -> int:
        """Id of its first process, as seen from outside; 0 when there is none."""
        try:
            pid, created = json.loads((self.folder / "init").read_text(encoding="utf-8"))
            process = psutil.Process(pid)
            return pid if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE else 0
        except (FileNotFoundError, psutil.NoSuchProcess):
            return 0

    def start(self, service: Sequence[str], *, hosts: str, outlives_us: bool) -> None:
        """Start it, without a network.

        Args:
            service: command that it runs; when that ends, the host does.
            hosts: its /etc/hosts.
            outlives_us: whether it stays when this process ends.
        Raises:
            RuntimeError: it did not start; with what it said.
        """
        for folder in ("home", "tmp"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        for name in ("init", "is_up"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "hosts").write_text(hosts, encoding="utf-8")
        ends_with_us = [] if outlives_us else ["setpriv", "--pdeathsig", "KILL"]
        init = ["bash", "-c", _INIT, "init", self.name, str(self.folder), str(_home())]
        kept = [word for place in _kept(self.folder.parent) for word in place]
        command = [*ends_with_us, "unshare", *NAMESPACES, "--kill-child=KILL", *init, *kept, "--", *service]
        with (self.folder / "log").open("ab") as log:
            outer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SHARED_MEMORY": _SHARED_MEMORY},
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not (self.folder / "is_up").exists():
            if outer.poll() is not None or time.monotonic() > deadline:
                outer.kill()
                said = (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start: {said}")
            time.sleep(0.02)
        [init_process] = psutil.Process(outer.pid).children()
        known = json.dumps([init_process.pid, init_process.create_time()])
        (self.folder / "init").write_text(known, encoding="utf-8")

    def command(self, command: Sequence[str], *, cwd: Path = REPOSITORY, **environment: str) -> list[str]:
        """The command line that runs a command in it."""
        assert self.pid, f"{self.name} does not run"
        values = {**self._environment, **environment}
        entered = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", "--ipc"]
        clean = ["env", "-i", "-C", str(cwd), *(f"{name}={value}" for name, value in values.items())]
        return [*entered, *clean, *command]

    def link_command(self, *arguments: str) -> None:
        """Run `ip` in its network alone."""
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", "ip", *arguments], check=True)

    def remove_link(self, name: str) -> None:
        """Remove a link, if there is one: that to a host which was killed goes some time after its processes."""
        command = ["nsenter", "-t", str(self.pid), "--net", "ip", "link", "del", name]
        subprocess.run(command, check=False, capture_output=True)

    def processes(self) -> Iterator[psutil.Process]:
        """All that runs in it."""
        pid = self.pid
        if not pid:
            return
        here = _pid_space(pid)
        for process in psutil.process_iter():
            if _pid_space(process.pid) == here:
                yield process

    def freeze(self, *, within_s: float = 10.0) -> None:
        """Stop every process where it stands; repeated, because one can fork another before it is stopped."""
        deadline = time.monotonic() + within_s
        while running := [process for process in self.processes() if _runs(process)]:
            assert time.monotonic() < deadline, f"{self.name} does not freeze: {running}"
            _send(running, signal.SIGSTOP)
            time.sleep(0.01)

    def thaw(self) -> None:
        """Let all go on."""
        _send(list(self.processes()), signal.SIGCONT)

    def kill(self, *, within_s: float = 20.0) -> None:
        """End it at once, with all that runs in it."""
        if not (pid := self.pid):
            return
        inside = list(self.processes())
        os.kill(pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(inside, timeout=within_s)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], f"{alive} still run"

    def forget_temporary_files(self) -> None:
        """What a boot does."""
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)


def _home() -> Path:
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def _kept(lab: Path) -> Iterator[tuple[str, str, str]]:
    """What a host sees of our home and our /tmp: its name for that folder, ours, and a path below both."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, REPOSITORY, lab)}
    for name, ours in (("home", _home()), ("tmp", Path("/tmp"))):
        for path in sorted(needed):
            if path.is_relative_to(ours.resolve()):
                yield name, str(ours), str(path.relative_to(ours.resolve()))


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
