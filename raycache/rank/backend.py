"""Choice of the attention backend."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from importlib import import_module

import torch

from raycache.attention.base import AttentionBackend
from raycache.attention.torch_ref import TorchBackend
from raycache.deployment.deployment import Deployment
from raycache.errors import ConfigError

_log = logging.getLogger(__name__)

OLDEST = (0, 7, 2)
"""Oldest supported FlashInfer version; the arguments of its plan functions differ in earlier ones."""
NEWEST = (0, 7)  # newest version covered by tests/gpu
_LEAST_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16


def choose_backend(deployment: Deployment, device: torch.device) -> AttentionBackend:
    """Choose FlashInfer where it works, else torch; the setting `attention` overrides the choice.

    Raises:
        ConfigError: attention=flashinfer, and FlashInfer does not work here.
    """
    config = deployment.config
    if config.attention == "torch":
        return TorchBackend()
    obstacle = device_obstacle(device, deployment.dtype) or package_obstacle()
    if not obstacle:
        from raycache.attention.flashinfer import FlashInferBackend

        pages = -(-deployment.max_model_len // config.page_size)
        return FlashInferBackend(device, max_pages=pages, max_tokens=deployment.max_step_tokens)
    if config.attention == "flashinfer":
        raise ConfigError(f"attention=flashinfer cannot be used: {obstacle}; or set attention=torch")
    if device.type == "cuda":
        _log.warning("using the torch attention backend, which is slower: %s", obstacle)
    return TorchBackend()


def import_kernels() -> None:
    """Import FlashInfer and Triton, which takes seconds, before the first kernel is needed.

    Failures are ignored here; `choose_backend` reports them.
    """
    with suppress(ImportError, OSError, RuntimeError):
        import_module("flashinfer")
    with suppress(ImportError, OSError, RuntimeError):
        from triton.runtime.cache import triton_key

        triton_key()  # reads all files of Triton, once per process


def device_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why FlashInfer cannot run on a device with this dtype, or ""."""
    if device.type != "cuda":
        return f"it needs CUDA, but ranks run on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it supports bfloat16 and float16, not {str(dtype).removeprefix('torch.')}; see dtype"
    if (found := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or higher, {device} has {found[0]}.{found[1]}"
    return ""


def package_obstacle() -> str:
    """Why the installed FlashInfer cannot be used, or ""; warns about versions newer than the tested ones."""
    wanted = f"pip install 'flashinfer-python>={_dotted(OLDEST)}'"
    try:
        from flashinfer import __version__ as version
    except ModuleNotFoundError as cause:
        return f"{cause}; {wanted} (or raycache[gpu])"
    except (ImportError, OSError, RuntimeError) as cause:
        # Importing flashinfer loads CUDA libraries and checks that the versions of its packages match.
        return f"flashinfer cannot be imported: {_first_line(cause)}; {wanted}"
    if (number := version_number(version)) < OLDEST:
        return f"flashinfer {version} is too old; {wanted}"
    if number[: len(NEWEST)] > NEWEST:
        _log.warning("flashinfer %s is newer than %s, the newest tested version", version, _dotted(NEWEST))
    return ""


def version_number(version: str) -> tuple[int, ...]:
    """Leading numbers of a version such as "0.7.2.post1": (0, 7, 2)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
