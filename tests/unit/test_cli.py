"""The command line: what it answers, what it says about bad input, and what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from launch import service
from launch.cli.main import main
from launch.flags import Parser, add_config_flags, settings
from launch.table import human_bytes, render
from raycache import __version__
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.rank.member import threads_of
from raycache.settings import kind_of

ROOT = Path(__file__).resolve().parent.parent.parent
FIGURES = {
    "model": "tiny",
    "ranks": [{"rank": 0}, {"rank": 1}],
    "running": 3,
    "waiting": 1,
    "pages_in_use": 7,
    "pages_total": 64,
    "prompt_tokens": 2000,
    "cached_tokens": 500,
    "output_tokens": 42,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No services but those of the test."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # a setting, which tests of others do not expect
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


def parsed(*arguments: str) -> dict[str, Any]:
    parser = Parser()
    add_config_flags(parser)
    return settings(parser.parse_args(arguments))


# --- help, version, errors


def test_help_imports_nothing_heavy() -> None:
    code = """
        import sys
        from raycache.__main__ import main
        sys.argv = ["raycache", "launch", "--help"]
        try:
            main()
        except SystemExit as end:
            assert end.code == 0
        print(*sys.modules, sep=",", file=sys.stderr)
    """
    done = python("-c", textwrap.dedent(code), cwd=ROOT)
    assert "--kv-memory" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.strip().split(",")}
    heavy = {
        "torch",
        "ray",
        "numpy",
        "pydantic",
        "starlette",
        "uvicorn",
        "tokenizers",
        "transformers",
        "yaml",
        "psutil",
    }
    assert "launch" in loaded and not loaded & heavy


def shown(*arguments: str) -> tuple[str, set[str]]:
    """What --help says, and the settings that it names."""
    output = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(output):
        main(["launch", *arguments])
    assert end.value.code == 0
    names = set(re.findall(r"^  --([a-z-]+)", output.getvalue(), re.MULTILINE))
    return output.getvalue(), {name.replace("-", "_") for name in names} - {"config", "help_all"}


def test_help_shows_at_most_25_entries_and_says_how_to_see_the_rest() -> None:
    text, names = shown("--help")
    assert "--help-all shows all" in text
    assert len(re.findall(r"^  (?:-|MODEL)", text, re.MULTILINE)) <= 25
    assert {"tp", "kv_memory", "host_memory", "storage", "port"} <= names


def test_help_all_shows_every_setting_with_what_its_value_is() -> None:
    text, names = shown("--help-all")
    assert names | {"model"} == {field.name for field in dataclasses.fields(Config)}
    assert "--prefetch-share FRACTION" in text and "--num-pages PAGES|auto" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lunch m", "unknown 'lunch'; did you mean 'launch'?"),
        ("serve m", "unknown 'serve'; use one of launch, status,"),
        ("cache statsu", "unknown 'statsu'; did you mean 'status'?"),
        ("launch m --kv_memory=4GiB", "unknown flag '--kv_memory'; did you mean '--kv-memory'?"),
        ("launch m --no-dashbord", "unknown flag '--no-dashbord'; did you mean '--no-dashboard'?"),
        ("launch m --cq 2", "unknown flag '--cq'; --help-all shows all flags\n"),
        ("launch m --tensor-parallel-size 2", "unknown flag '--tensor-parallel-size'; use --tp\n"),
        ("launch m --max-num-seqs=8", "unknown flag '--max-num-seqs'; use --max-running\n"),
        ("launch m --enable-prefix-caching", "; not needed: --prefix-cache is the default\n"),
        ("status --max-num-seqs=8", "unknown flag '--max-num-seqs'\n"),
        ("launch m -tp 2", "unknown flag '-tp'; did you mean '--tp'?"),
        ("launch m n", "unknown argument 'n'\n"),
        ("launch m --device tpu", "unknown 'tpu'; use one of auto, cpu, cuda"),
        ("launch m --num-pages all", "'all' is not a whole number or auto"),
        ("status --jsno", "unknown flag '--jsno'; did you mean '--json'?"),
    ],
)
def test_a_mistyped_word_gets_the_one_that_was_meant_or_none(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_the_usual_flag_shows_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code and capsys.readouterr().out == f"raycache {__version__}\n"


def test_version_names_the_packages_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["raycache"] == __version__ and {"ray", "torch", "python"} <= said.keys()


@pytest.mark.parametrize("arguments", [["serve"], ["launch", "m", "--tp", "two"], ["launch", "m", "--device", "tpu"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "usage: raycache" in capsys.readouterr().err


def test_no_command_and_help_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "usage: raycache" in said.err and "serve a model until Ctrl-C" in said.err
    for words in ([], ["cache", "attach"]):
        with pytest.raises(SystemExit) as end:
            main(["help", *words])
        assert not end.value.code and capsys.readouterr().out.startswith(" ".join(["usage: raycache", *words]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch"], "no model"),
        (["launch", "m", "--cp", "3"], "cp=3 does not divide page_size=64"),
        (["launch", "m", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["doctor"], "no model"),
        (["status", "--endpoint", "file:///etc/passwd"], "is not a valid endpoint"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("raycache: error: ") and said in error and error.count("\n") == 1


def test_a_missing_directory_is_refused_before_ray_and_torch_are_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from launch.cli.main import main; code = main(['launch', './nowhere']); "
        "print(*sys.modules.keys() & {'ray', 'torch', 'uvloop'}); sys.exit(code)"
    )
    done = python("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "'./nowhere' is neither a directory" in done.stderr and done.stdout == "\n"


def test_a_foreign_package_that_shadows_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("raise SystemExit('foreign code ran')")
    done = python("-m", "raycache", "version", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and str(tmp_path / "launch") in done.stderr and "foreign code" not in done.stderr


def test_a_missing_package_of_ours_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "raycache", tmp_path / "raycache")
    # -S and -E: neither site-packages nor PYTHONPATH, where this checkout may be.
    done = python("-S", "-E", "-m", "raycache", "version", cwd=tmp_path)
    assert done.returncode == 2 and f"'actors' is missing, it should be {tmp_path / 'actors'}" in done.stderr


# --- settings


def test_every_setting_is_a_flag_with_its_type() -> None:
    wanted: dict[str, Any] = {}
    arguments: list[str] = []
    for field in dataclasses.fields(Config):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            wanted[field.name] = not default
            arguments.append(flag.replace("--", "--no-") if default else flag)
            continue
        value = {str: (field.metadata["choices"] or ["x"])[-1], int: 2, float: 7.5}[kind_of(field)]
        wanted[field.name] = value
        arguments += [value] if field.name == "model" else [flag, str(value)]
    assert parsed(*arguments) == wanted


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "tp": 3, "cp": 2, "api_key": "from file"}))
    assert parsed("--config", str(file), "--cp", "4") == {"model": "m", "tp": 3, "cp": 4, "api_key": "from file"}
    monkeypatch.setenv("RAYCACHE_API_KEY", "from environment")
    assert parsed("--config", str(file))["api_key"] == "from environment"
    assert parsed("--config", str(file), "--api-key", "flag")["api_key"] == "flag"


@pytest.mark.parametrize("text", ["[1, 2]", "tp: [", "just text", "1: 2", "tp: 2\ntp", "\x00"])
def test_a_file_that_holds_no_settings_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="serve.yaml"):
        parsed("m", "--config", str(file))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert parsed("m", "--config", str(tmp_path / "empty.yaml")) == {"model": "m"}


# --- running services


def write_state(home: Path, **changes: Any) -> Path:
    me = psutil.Process()
    state = service.Service(
        me.pid, me.create_time(), "http://127.0.0.1:1", "tiny", "local", "", "2024-01-01T00:00:00+00:00"
    )
    folder = home / ".raycache" / "run"
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    path = folder / "1-1.json"
    path.write_text(json.dumps(dataclasses.asdict(state) | changes))
    return path


def test_a_registered_service_is_found_and_gone_after_its_block(home: Path) -> None:
    with service.register("http://127.0.0.1:8123", model="tiny", ray_address="local", dashboard="") as mine:
        assert service.running() == [mine] and mine.port == 8123
        (file,) = (home / ".raycache" / "run").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert service.running() == [] and not list(file.parent.iterdir())


def test_a_service_is_found_without_the_runtime_folder_it_was_started_with(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.register("http://127.0.0.1:8123", model="tiny", ray_address="local", dashboard="") as mine:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
        assert service.running() == [mine]


def test_the_state_of_a_dead_process_is_dropped(home: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = write_state(home, pid=ended.pid)
    assert service.running() == [] and not path.exists()


def test_a_process_id_that_was_used_again_is_not_taken_for_the_service(home: Path) -> None:
    path = write_state(home, create_time_s=psutil.Process().create_time() - 3600)
    assert service.running() == [] and not path.exists()


def test_a_file_that_describes_no_service_is_ignored(home: Path) -> None:
    path = write_state(home)
    path.write_text('{"pid": 1}')
    assert service.running() == []


def test_a_state_folder_that_others_can_write_to_is_refused(home: Path) -> None:
    write_state(home).parent.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write"):
        service.running()


def test_nothing_running_is_said_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert main(["stop"]) == main(["stop", "8000"]) == main(["stop", "--all"]) == 1
    captured = capsys.readouterr()
    assert "no service runs" in captured.out and captured.err.count("no service runs on this machine") == 3
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []


class Answer(BaseHTTPRequestHandler):
    """A service with a key, as far as `status` can see."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if known and self.path == "/status" else 401)
        self.end_headers()
        self.wfile.write(json.dumps(FIGURES).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_status_shows_the_figures_of_a_running_service(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYCACHE_API_KEY", "secret")
    with service.register(endpoint, model="tiny", ray_address="local", dashboard=""):
        assert main(["status"]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert row.split() == f"{endpoint} tiny {os.getpid()} 2 3 1 7/64 25.0 % 42 ok".split()
        assert header.index("STATE") == row.index("ok")
        assert main(["status", "--json"]) == 0
        (report,) = json.loads(capsys.readouterr().out)
    assert report["figures"] == FIGURES and report["service"]["pid"] == os.getpid()


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
def test_the_endpoint_that_launch_prints_is_accepted(
    suffix: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYCACHE_API_KEY", "secret")
    assert main(["status", "--endpoint", endpoint + suffix]) == 0
    assert "tiny" in capsys.readouterr().out


def test_status_tells_tiers_and_warnings(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYCACHE_API_KEY", "secret")
    monkeypatch.setitem(FIGURES, "cached_by_tier", {"device": 300, "host": 200, "storage": 0})
    monkeypatch.setitem(FIGURES, "warnings", ["storage stores and never hits"])
    assert main(["status", "--endpoint", endpoint]) == 0
    said = capsys.readouterr().out
    assert "25.0 % (device 15.0, host 10.0, storage 0.0)" in said
    assert "ok, warnings: 1, see raycache cache status" in said


def test_status_of_a_remote_endpoint_without_its_key_says_which_variable_to_set(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--endpoint", endpoint]) == 1
    assert "set RAYCACHE_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["top", "--once", "--interval-s", "0.1"]])
def test_a_key_is_a_flag_and_a_wrong_one_is_called_wrong(
    command: list[str], endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FIGURES, "ranks", [])
    assert main([*command, "--endpoint", endpoint, "--api-key", "secret"]) == 0
    assert "tiny" in capsys.readouterr().out
    assert main([*command, "--endpoint", endpoint, "--api-key", "guess"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the API key is wrong" in said and "RAYCACHE_API_KEY" not in said


def test_a_service_that_does_not_answer_is_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with service.register("http://127.0.0.1:9", model="tiny", ray_address="local", dashboard=""):
        assert main(["status"]) == 1
    assert "no response: " in capsys.readouterr().out


SERVICE = """
import signal, subprocess, sys, time
from launch import service
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with service.register("http://127.0.0.1:8123", model="tiny", ray_address="local", dashboard=""):
    for name in sys.argv[1:]:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    print(child.pid, flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        child.kill()
        child.wait()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., psutil.Process]]:
    """Start a service that ignores some signals; gives the process that it has started in turn."""
    services: list[subprocess.Popen[str]] = []

    def start(*ignored: str) -> psutil.Process:
        # As a person's shell does; a test runner in the background passes on an ignored SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        started = subprocess.Popen(
            [sys.executable, "-c", SERVICE, *ignored], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        signal.signal(signal.SIGINT, before)
        services.append(started)
        assert started.stdout is not None
        child = psutil.Process(int(started.stdout.readline()))
        threading.Thread(target=started.wait, daemon=True).start()
        return child

    yield start
    for started in services:
        started.kill()
        started.wait()


@pytest.mark.parametrize(
    "name", ["", "8123", "tiny", "http://127.0.0.1:8123", "http://127.0.0.1:8123/v1", "http://127.0.0.1:8123/v1/"]
)
def test_stop_interrupts_the_only_service_and_the_one_that_is_named(
    name: str, start: Callable[..., psutil.Process], capsys: pytest.CaptureFixture[str]
) -> None:
    child = start()
    assert main(["stop", "8124"]) == 2 and len(service.running()) == 1
    assert "no service '8124' on this machine" in capsys.readouterr().err
    assert main(["stop", name]) == 0
    assert capsys.readouterr().out.endswith(": stopped\n")
    assert gone(child) and service.running() == []


def test_stop_asks_which_of_several_services(
    start: Callable[..., psutil.Process], capsys: pytest.CaptureFixture[str]
) -> None:
    children = [start(), start()]
    first, second = service.running()
    assert main(["stop"]) == main(["stop", "tiny"]) == main(["stop", "8123", "--all"]) == 2
    error = capsys.readouterr().err
    assert "2 services run on this machine" in error and "2 services are named 'tiny'" in error
    assert error.count(str(first.pid)) == error.count(str(second.pid)) == 2 and "not both" in error
    assert main(["stop", str(first.pid)]) == 0 and service.running() == [second]
    assert main(["stop", "--all"]) == 0 and service.running() == []
    assert all(map(gone, children))


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        (["SIGINT"], "did not stop within 0.5 s, terminated, with 1 of its child processes"),
        (["SIGINT", "SIGTERM"], "did not stop within 1 s, killed, with 1 of its child processes"),
    ],
)
def test_a_service_that_ignores_signals_is_ended_with_what_it_started(
    ignored: list[str], said: str, start: Callable[..., psutil.Process]
) -> None:
    child = start(*ignored)
    (mine,) = service.running()
    assert service.stop(mine, grace_s=0.5, terminate_s=0.5) == said
    assert gone(child) and service.running() == []
    assert service.stop(mine, grace_s=0.5) == "had already ended"


def gone(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 5
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- tables


def test_columns_line_up_and_lines_have_no_trailing_spaces() -> None:
    assert render(("A", "LONG"), rows=[("wide", 1), ("x", "")]).splitlines() == ["A     LONG", "wide  1", "x"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "raycache", "version"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("module", "is_explained"), [("psutil", True), ("actors.cluster", False)])
def test_a_missing_dependency_is_named_without_a_traceback(tmp_path: Path, module: str, is_explained: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    # None in sys.modules is how Python marks a module that cannot be found.
    code = (
        "import sys; from launch.cli.main import main; "
        f"sys.modules['{module}'] = None; sys.exit(main(['launch', '{tmp_path}', '--port', 'auto']))"
    )
    done = python("-c", code, cwd=ROOT)
    assert module in done.stderr
    assert ("Traceback" in done.stderr) is not is_explained
    assert (done.returncode == 2) is is_explained
    assert (f"{sys.executable} -m pip install raycache\n" in done.stderr) is is_explained


@pytest.mark.parametrize(
    ("variable", "flags", "threads"),
    [("", [], "auto"), ("3", [], 3), ("4,2", [], 4), ("3", ["--cpu-threads", "5"], 5)],
)
def test_threads_of_the_environment_win_over_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, variable: str, flags: list[str], threads: object
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    parser = Parser()
    add_config_flags(parser)
    config = Config.from_mapping(settings(parser.parse_args(["m", *flags])))
    assert config.cpu_threads == threads
    share = 4 if threads == "auto" else threads
    assert threads_of(config, cpus=16, ranks_on_node=4) == share


def test_threads_that_are_no_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    parser = Parser()
    add_config_flags(parser)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS='many'"):
        settings(parser.parse_args(["m"]))
