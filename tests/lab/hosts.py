"""A lab: several hosts on this machine and a control space beside them, joined by a bridge.

    control 10.88.0.1 - bridge - host 0  10.88.0.10   sshd
                             ` - host 1  10.88.0.11   sshd ...

Everything runs in namespaces of its own (space.py): no address, route or name of this machine changes, and two labs do
not see each other. Nothing inside reaches the outside.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.lab.space import NAMESPACES, Space

CONTROL_ADDRESS = "10.88.0.1"
_PREFIX = "rclab-"
_SSHD_S = 20.0
_TOOLS = ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "rsync")
_SSH_OPTIONS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10")
_YOUNG_S = 60.0


def missing() -> str:
    """Why there can be no lab here, for people; empty when there can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "a lab of hosts needs Linux and root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if lacking or not Path("/usr/sbin/sshd").exists():
        return f"a lab of hosts needs {', '.join(lacking or ['sshd'])}; scripts/lab_tools installs it"
    probe = ["unshare", *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Lab:
    """Hosts that run, or ran, in a folder; see `start`.

    Args:
        folder: of the lab.

    Attributes:
        folder: the only one that all hosts, the control space and this process share; `folder / "shared"` is for files.
        control: the space beside the hosts, from which they are reached: a laptop.
        hosts: their spaces.
        key: file with the private key that every host's root takes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[str, Any] = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
        self.key = folder / "key"
        self._environment = _environment(self._facts["environment"])

        def space(name: str) -> Space:
            return Space(name, folder=folder / name, environment=self._environment)

        self.control = space("control")
        self.hosts = [space(f"h{number}") for number in range(self._facts["num_hosts"])]

    @classmethod
    def start(
        cls,
        num_hosts: int,
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        outlives_us: bool = False,
    ) -> Lab:
        """Make and start a lab.

        Args:
            num_hosts: at most 90.
            folder: for its files, with a short path; None for a new one.
            environment: added to that of all commands, on hosts too.
            outlives_us: whether it stays when this process ends; else the kernel ends it then.
        """
        sweep()
        folder = folder or Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        (folder / "shared").mkdir(parents=True, exist_ok=True)
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        me = psutil.Process()
        facts = {
            "num_hosts": num_hosts,
            "environment": dict(environment or {}),
            "owner": None if outlives_us else [me.pid, me.create_time()],
        }
        (folder / "lab.json").write_text(json.dumps(facts), encoding="utf-8")
        lab = cls(folder)
        try:
            lab._start_control()
            for number in range(num_hosts):
                lab.start_host(number)
        except BaseException:
            lab.down()
            raise
        return lab

    # --- what runs where ----------------------------------------------------------------------------------------------

    def address(self, number: int) -> str:
        """Of a host, in the lab's network."""
        return f"10.88.0.{10 + number}"

    def ssh_command(self, number: int, command: str, *, is_terminal: bool = False) -> list[str]:
        """The command line that runs a shell command on a host, as somebody who logs in from the control space.

        Args:
            number: of the host.
            command: for a shell.
            is_terminal: whether it has one, and so ends when the connection does.
        """
        options = [word for option in _SSH_OPTIONS for word in ("-o", option)] + ["-tt"] * is_terminal
        login = f"bash --login -c {shlex.quote(command)}"
        return self.control.command(["ssh", "-i", str(self.key), *options, f"root@{self.address(number)}", login])

    def on(self, number: int, command: str, *, timeout_s: float = 60.0) -> str:
        """Run a shell command on a host over ssh; its output.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        return _output(self.ssh_command(number, command), timeout_s=timeout_s)

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0, **environment: str) -> str:
        """Run a command in the control space; its output, that to stderr included.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        return _output(self.control.command(command, **environment), timeout_s=timeout_s)

    def await_port(self, port: int, *, address: str = "127.0.0.1", within_s: float = 30.0) -> None:
        """Wait until something listens on a port that the control space reaches."""
        deadline = time.monotonic() + within_s
        look = self.control.command(["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"])
        while subprocess.run(look, capture_output=True, timeout=20).returncode:
            assert time.monotonic() < deadline, f"nothing listens on port {port} of {address}"
            time.sleep(0.2)

    # --- faults -------------------------------------------------------------------------------------------------------

    def start_host(self, number: int) -> None:
        """Start a host, or start it again after `kill`: its home is what it was, temporary files are gone."""
        host = self.hosts[number]
        host.forget_temporary_files()
        self._write_files(number)
        hosts = "".join(f"{self.address(n)} h{n}\n" for n in range(len(self.hosts)) if n != number)
        # As Debian writes it: whoever looks up a host's own name finds a loopback address.
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{hosts}"
        sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", str(host.folder / "sshd_config")]
        host.start(sshd, hosts=hosts, outlives_us=self._facts["owner"] is None)
        card = f"02:00:0a:58:00:{10 + number:02x}"  # the same after a start: others remember it
        cable = ["link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0"]
        self.control.remove_link(f"v{number}")
        self.control.link_command(*cable, "address", card, "netns", str(host.pid))
        self.control.link_command("link", "set", f"v{number}", "master", "lab0", "up")
        host.link_command("addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        host.link_command("link", "set", "eth0", "up")
        self._await_sshd(number)

    def cut(self, number: int) -> None:
        """Take a host's link down."""
        self.control.link_command("link", "set", f"v{number}", "down")

    def heal(self, number: int) -> None:
        """Take it up again."""
        self.control.link_command("link", "set", f"v{number}", "up")

    def slow(self, number: int, *, kilobytes_per_s: int) -> None:
        """Let no more than so much through a host's link, both ways together twice that; 0 for all again."""
        for space, device in ((self.control, f"v{number}"), (self.hosts[number], "eth0")):
            shape = ["tc", "qdisc", "replace", "dev", device, "root"]
            limit = ["tbf", "rate", f"{8 * kilobytes_per_s}kbit", "burst", "16kb", "latency", "400ms"]
            _tc(space, [*shape, *limit] if kilobytes_per_s else ["tc", "qdisc", "del", "dev", device, "root"])

    def delay(self, number: int, *, milliseconds: int) -> None:
        """Delay what goes through a host's link, each way; 0 for no more.

        Raises:
            CalledProcessError: this kernel cannot (`can_delay`).
        """
        for space, device in ((self.control, f"v{number}"), (self.hosts[number], "eth0")):
            added = ["tc", "qdisc", "replace", "dev", device, "root", "netem", "delay", f"{milliseconds}ms"]
            _tc(space, added if milliseconds else ["tc", "qdisc", "del", "dev", device, "root"])

    def can_delay(self) -> bool:
        """Whether this kernel can delay packets."""
        command = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        tried = subprocess.run(
            ["nsenter", "-t", str(self.control.pid), "--net", *command], capture_output=True, timeout=20
        )
        if tried.returncode == 0:
            _tc(self.control, ["tc", "qdisc", "del", "dev", "lo", "root"])
        return tried.returncode == 0

    def down(self) -> None:
        """End everything and remove the folder."""
        for space in (*self.hosts, self.control):
            space.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the parts of the start ---------------------------------------------------------------------------------------

    def _start_control(self) -> None:
        hosts = "".join(f"{self.address(n)} h{n}\n" for n in range(len(self.hosts)))
        outlives_us = self._facts["owner"] is None
        self.control.start(
            ["sleep", "infinity"], hosts=f"127.0.0.1 localhost control\n{hosts}", outlives_us=outlives_us
        )
        self.control.link_command("link", "add", "lab0", "type", "bridge")
        self.control.link_command("addr", "add", f"{CONTROL_ADDRESS}/24", "dev", "lab0")
        self.control.link_command("link", "set", "lab0", "up")

    def _write_files(self, number: int) -> None:
        host = self.hosts[number]
        home = host.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        values = self._environment
        if not (home / ".bashrc").exists():
            # /etc/profile sets another PATH for those who log in.
            (home / ".bashrc").write_text(f"export PATH={values['PATH']}\n", encoding="utf-8")
            (home / ".bash_profile").write_text(". ~/.bashrc\n", encoding="utf-8")
        lines = [
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/key.pub",
            f"PidFile {host.folder}/sshd.pid",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "UsePAM no",
            "MaxStartups 100",
            "MaxSessions 100",
            "SetEnv " + " ".join(f"{name}={value}" for name, value in values.items() if name != "HOME"),
        ]
        (host.folder / "sshd_config").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _await_sshd(self, number: int) -> None:
        deadline = time.monotonic() + _SSHD_S
        while True:
            try:
                self.on(number, "true")
                return
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nobody can log in to {self.hosts[number].name}: {error}") from error
            time.sleep(0.1)


@contextmanager
def lab_of(num_hosts: int, **environment: str) -> Iterator[Lab]:
    """A lab for the length of a block."""
    lab = Lab.start(num_hosts, environment=environment)
    try:
        yield lab
    finally:
        lab.down()


def sweep() -> None:
    """Remove labs whose owners are dead."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        try:
            owner = json.loads((folder / "lab.json").read_text(encoding="utf-8"))["owner"]
        except FileNotFoundError:  # it is being made, or never was
            if time.time() - folder.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        if owner is None:
            is_owned = Lab(folder).control.pid != 0
        else:
            is_owned = psutil.pid_exists(owner[0]) and psutil.Process(owner[0]).create_time() == owner[1]
        if not is_owned:
            Lab(folder).down()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {
        "PATH": f"{here}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(Path.home()),
        "LANG": "C.UTF-8",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_THREAD_LIMIT": "1",  # as in tests/conftest.py
        "PYTHONUNBUFFERED": "1",  # what goes into a file can be waited for
        "RAY_worker_niceness": "0",  # or it waits for whatever else runs on this machine
        **added,
    }


def _output(command: Sequence[str], *, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode} of {' '.join(command[-3:])}:\n{done.stdout[-6000:]}")
    return done.stdout


def _tc(space: Space, command: list[str]) -> None:
    subprocess.run(["nsenter", "-t", str(space.pid), "--net", *command], check=True, timeout=20)
