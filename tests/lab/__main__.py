"""A lab by hand: python -m tests.lab up 3, and then on, control, cut, heal, slow, freeze, thaw, kill, start, down."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.lab.hosts import Lab, missing

_FOLDER = Path("/tmp/raycache-lab")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="of the lab (default: %(default)s)")
    orders = parser.add_subparsers(dest="order", required=True)
    up = orders.add_parser("up", help="make hosts")
    up.add_argument("num_hosts", type=int)
    up.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of all commands on all hosts")
    on = orders.add_parser("on", help="run a shell command on a host, over ssh")
    on.add_argument("host", type=int)
    on.add_argument("words", nargs=argparse.REMAINDER)
    orders.add_parser("control", help="run a command beside the hosts").add_argument("words", nargs=argparse.REMAINDER)
    for order in ("cut", "heal", "freeze", "thaw", "kill", "start"):
        orders.add_parser(order, help=f"{order} a host").add_argument("host", type=int)
    slow = orders.add_parser("slow", help="bound a host's link")
    slow.add_argument("host", type=int)
    slow.add_argument("kilobytes_per_s", type=int)
    orders.add_parser("down", help="end all")
    return _do(parser.parse_args())


def _do(options: argparse.Namespace) -> int:
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    if options.order == "up":
        environment = dict(value.split("=", 1) for value in options.env)
        lab = Lab.start(options.num_hosts, folder=options.folder, environment=environment, outlives_us=True)
        print(*(lab.address(number) for number in range(options.num_hosts)))
        return 0
    lab = Lab(options.folder)
    match options.order:
        case "on":
            return subprocess.run(lab.ssh_command(options.host, " ".join(options.words))).returncode
        case "control":
            return subprocess.run(lab.control.command(options.words)).returncode
        case "cut":
            lab.cut(options.host)
        case "heal":
            lab.heal(options.host)
        case "slow":
            lab.slow(options.host, kilobytes_per_s=options.kilobytes_per_s)
        case "freeze":
            lab.hosts[options.host].freeze()
        case "thaw":
            lab.hosts[options.host].thaw()
        case "kill":
            lab.hosts[options.host].kill()
        case "start":
            lab.start_host(options.host)
        case "down":
            lab.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
