"""Keeps the models of transformers in plain torch, whatever kernels are installed; importing this is enough.

Where `fla` is installed, as on GPU machines, its recurrent layers call it. It takes no tensors on a CPU, and RayCache
calls it too, so the comparison would not be independent.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from transformers.integrations import hub_kernels

_PACKAGES = {"causal_conv1d", "fla", "mamba_ssm"}


def _import_module(name: str, package: str | None = None) -> ModuleType:
    if name.partition(".")[0] in _PACKAGES:
        raise ImportError(f"{name} is not used here")
    return importlib.import_module(name, package)


_without_kernels = ModuleType("importlib")
vars(_without_kernels).update({**vars(importlib), "import_module": _import_module})
hub_kernels.importlib = _without_kernels  # type: ignore[attr-defined]
