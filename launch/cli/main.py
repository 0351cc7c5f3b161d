"""The command line. Commands import their dependencies when they run, so that --help is fast."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.cli.cache import add_cache_flags
from launch.cli.cachecheck import add_cachecheck_flags
from launch.cli.replicas import add_replicas_flags
from launch.cli.stop import add_stop_flags
from launch.cli.why import add_why_flags
from launch.environment import keep_ray_on_loopback
from launch.flags import Parser, add_config_flags, seconds, settings
from raycache import __version__
from raycache.config import Config
from raycache.errors import ConfigError, RayCacheError

_EXAMPLES = """\
examples:
  raycache demo-model models/smollm2        write a small real model, without a download
  raycache doctor models/smollm2 --cp 2     check whether it would run
  raycache launch models/smollm2 --cp 2     serve it until Ctrl-C
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: without the program's name; None: those of this process.
    Returns:
        Exit code: 0: success; 1: negative result; 2: error; 130: interrupted; 141: standard output was closed.
    """
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()
        return code
    except RayCacheError as error:
        print(f"raycache: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "raycache").partition(".")[0] in ("raycache", "actors", "launch"):
            raise
        print(
            f"raycache: error: the Python module {error.name} is missing; it comes with RayCache's dependencies, "
            f"install it again without --no-deps: {sys.executable} -m pip install raycache",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again on exit
        return 141


def _is_output_closed() -> bool:
    """Whether standard output was closed by its reader, as in `raycache ... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="raycache",
        description="Serve large language models on Ray, with one KV cache over GPU, host memory and storage.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"raycache {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(command=lambda _: _no_command(parser))

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(command=command)
        return added

    add_config_flags(add("launch", _launch, "serve a model until Ctrl-C"))
    _add_status_flags(add("status", _status, "show the services running on this machine"))
    top = add("top", _top, "watch a running service in the terminal")
    top.add_argument("--endpoint", metavar="URL", help="server on another machine, such as http://HOST:8000")
    top.add_argument("--api-key", metavar="KEY", default="", help="API key of the server (or set RAYCACHE_API_KEY)")
    for flag, default, text in (
        ("--interval-s", 2.0, "time between updates"),
        ("--timeout-s", 5.0, "time limit for a response"),
    ):
        top.add_argument(
            flag, type=seconds, metavar="SECONDS", default=default, help=f"{text} (default: %(default)g s)"
        )
    top.add_argument("--once", action="store_true", help="print a single frame")
    boards = add("dashboards", _dashboards, "write a Grafana dashboard, alert rules and a Prometheus configuration")
    boards.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="directory to write to (default: Ray's, from which its Grafana loads the dashboard)",
    )
    boards.add_argument(
        "--server",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="scrape /metrics of this server instead of Ray's metrics; repeatable",
    )
    add_cache_flags(add("cache", _cache, "inspect and change the cache of a running server"))
    add_why_flags(add("why", _why, "show why a running server recomputed prompts"))
    add_replicas_flags(add("replicas", _replicas, "start, drain and replace the replicas of a running server"))
    add_stop_flags(add("stop", _stop, "stop a service running on this machine"))
    _add_key_flags(add("key", _key, "create an API key for a tenant, and its line for the --api-keys file"))
    add_config_flags(add("doctor", _doctor, "check whether launch would work, without loading weights"))
    add_config_flags(add("prepare", _prepare, "compile the kernels of a deployment in advance"))
    add_cachecheck_flags(add("cachecheck", _cachecheck, "test whether a server answers correctly from its cache"))
    demo = add("demo-model", _demo_model, "write a small real model as a Hugging Face directory")
    demo.add_argument("directory", metavar="DIR", type=Path, help="directory to write to")
    helped = add("help", _help, "show this help, or that of a command")
    helped.add_argument("words", metavar="COMMAND", nargs="*", help="such as launch, or cache attach")
    add("version", _version, "print the versions of RayCache, Ray, torch and Python")
    return parser


def _add_status_flags(status: argparse.ArgumentParser) -> None:
    status.add_argument("--endpoint", metavar="URL", help="server on another machine, such as http://HOST:8000")
    status.add_argument("--api-key", metavar="KEY", default="", help="API key of the server (or set RAYCACHE_API_KEY)")
    status.add_argument("--json", action="store_true", help="print all statistics as JSON")
    status.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="SECONDS",
        default=5.0,
        help="time limit for a response (default: %(default)g s)",
    )


def _add_key_flags(key: argparse.ArgumentParser) -> None:
    key.add_argument("name", metavar="NAME", help="name of the tenant")
    key.add_argument(
        "rights",
        metavar="RIGHT",
        nargs="*",
        help="admin, metrics, requests=N (maximum concurrent requests) or repairs=off",
    )
    key.add_argument("--file", metavar="FILE", type=Path, help="append the line to this file")


def _launch(options: argparse.Namespace) -> int:
    values = settings(options)
    config = Config.from_mapping(values)
    from launch.cli import job

    job.check_client()
    if job.is_remote(config.address):
        return job.run(values)
    _check_directory(config.model)
    if config.address == "local":
        keep_ray_on_loopback()
    from launch.cli.cluster import run

    return run(config)


def _check_directory(model: str) -> None:
    """Refuse a missing directory before the imports of a launch, which take seconds."""
    from raycache.checkpoint.hub_id import hub_id

    if hub_id(model) is None and not Path(model).is_dir():
        raise ConfigError(f"model {model!r} is neither a directory nor a name on the Hub such as Qwen/Qwen3-8B")


def _doctor(options: argparse.Namespace) -> int:
    values = settings(options)
    from launch.doctor.command import run

    return run(values)


def _prepare(options: argparse.Namespace) -> int:
    from launch.cli.prepare import run

    return run(settings(options))


def _cachecheck(options: argparse.Namespace) -> int:
    from launch.cli.cachecheck import run

    return run(options)


def _demo_model(options: argparse.Namespace) -> int:
    from launch.demo.model import make_demo_model

    make_demo_model(options.directory)
    print(f"{options.directory} is ready; serve it with: raycache launch {options.directory}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from launch.cli import status
    from launch.service import running

    chosen = [(options.endpoint, None)] if options.endpoint else [(one.endpoint, one) for one in running()]
    asked = [
        status.ask(endpoint, service=service, timeout_s=options.timeout_s, key=options.api_key)
        for endpoint, service in chosen
    ]
    if options.json:
        print(status.as_json(asked))
    elif asked:
        print(status.as_table(asked))
    else:
        print("no service runs on this machine")
    return 0 if asked and not any(report.error for report in asked) else 1


def _top(options: argparse.Namespace) -> int:
    from launch.cli.top import run

    return run(
        options.endpoint,
        key=options.api_key,
        interval_s=options.interval_s,
        timeout_s=options.timeout_s,
        is_once=options.once,
    )


def _dashboards(options: argparse.Namespace) -> int:
    from launch.dashboards.files import RAY_FOLDER, write

    for path in write(options.directory or RAY_FOLDER, servers=tuple(options.server)):
        print(path)
    return 0


def _cache(options: argparse.Namespace) -> int:
    from launch.cli.cache import run

    return run(options)


def _why(options: argparse.Namespace) -> int:
    from launch.cli.why import run

    return run(options)


def _replicas(options: argparse.Namespace) -> int:
    from launch.cli.replicas import run

    return run(options)


def _key(options: argparse.Namespace) -> int:
    from launch.http.keys import add_line, new_key

    key, line = new_key(options.name, rights=tuple(options.rights))
    if options.file is None:
        print(f"line for the --api-keys file:\n{line}", file=sys.stderr)
    else:
        add_line(options.file, line)
        print(f"added {options.name} to {options.file}; running servers reload it automatically", file=sys.stderr)
    print("API key (not shown again):", file=sys.stderr)
    print(key)
    return 0


def _stop(options: argparse.Namespace) -> int:
    from launch.cli.stop import run

    return run(options)


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _help(options: argparse.Namespace) -> int:
    return main([*options.words, "--help"])


def _version(options: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    print("raycache", __version__)
    for package in ("ray", "torch"):
        try:
            print(package, version(package))
        except PackageNotFoundError:
            print(package, "not installed")
    print("python", ".".join(map(str, sys.version_info[:3])))
    return 0
