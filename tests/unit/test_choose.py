"""Which attention backend is chosen, and what is said when it is not the fast one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycache.attention.torch_ref import TorchBackend
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.errors import ConfigError
from raycache.models.base import ModelConfig, read_config
from raycache.rank.backend import choose_backend, device_obstacle, package_obstacle, version_number
from tests.oracle.tiny import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a package named flashinfer is found, before one that may really be there."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flashinfer").mkdir()
    yield tmp_path / "flashinfer" / "__init__.py"
    sys.modules.pop("flashinfer", None)


def test_ranks_on_the_cpu_compute_with_torch_and_say_nothing(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    for wish in ("auto", "torch"):
        assert isinstance(choose_backend(Deployment(Config(attention=wish), model, "cpu"), CPU), TorchBackend)
    assert not caplog.records


def test_flashinfer_on_the_cpu_is_refused(model: ModelConfig) -> None:
    deployment = Deployment(Config(attention="flashinfer", dtype="bfloat16"), model, "cpu")
    with pytest.raises(
        ConfigError, match=r"^attention=flashinfer .*CUDA, but ranks run on cpu; or set attention=torch$"
    ):
        choose_backend(deployment, CPU)


def test_flashinfer_does_no_float32() -> None:
    assert "not float32" in device_obstacle(torch.device("cuda:0"), torch.float32)


def test_a_flashinfer_that_is_not_installed_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "pip install 'flashinfer-python>=0.7.2'" in package_obstacle()


@pytest.mark.parametrize("version", ["0.7.1", "0.6.14.post2", "0.7", "0.0.0+unknown", "dev"])
def test_a_flashinfer_that_is_too_old_is_told_with_the_one_that_would_do(installed: Path, version: str) -> None:
    installed.write_text(f"__version__ = {version!r}\n")
    assert package_obstacle() == f"flashinfer {version} is too old; pip install 'flashinfer-python>=0.7.2'"


@pytest.mark.parametrize(("version", "is_noted"), [("0.7.2", False), ("0.7.12.post1", False), ("0.8.0", True)])
def test_a_flashinfer_that_is_newer_than_tested_is_used_and_noted(
    installed: Path, version: str, is_noted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    installed.write_text(f"__version__ = {version!r}\n")
    with caplog.at_level(logging.WARNING):
        assert package_obstacle() == ""
    assert ("newer than 0.7" in caplog.text) is is_noted


def test_a_flashinfer_that_cannot_be_imported_is_told_in_one_line(installed: Path) -> None:
    installed.write_text("raise OSError('libcudart.so.13: cannot open shared object file\\nand more')\n")
    assert package_obstacle().startswith("flashinfer cannot be imported: libcudart.so.13: cannot open shared object")
    assert "\n" not in package_obstacle()


def test_versions_are_compared_as_numbers() -> None:
    assert version_number("0.10.1rc2") == (0, 10, 1) > version_number("0.7.2.post1") == (0, 7, 2)
