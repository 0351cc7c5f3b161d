"""`raycache prepare`: compiles the kernels of a deployment ahead of its start, with random weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.environment import kernel_caches
from launch.table import counted, human_bytes, render
from raycache.config import Config
from raycache.errors import ConfigError

_LIBRARIES = {"flashinfer": "*.so", "triton": "*.cubin"}
"""Library -> its compiled kernels, at any depth of its folder."""

_OVERRIDES = {"device": "cuda", "dummy_weights": True, "storage": "none", "replicas": 1, "address": "local"}
"""Settings that do not change kernels."""


def run(values: Mapping[str, Any]) -> int:
    """Start the ranks of a deployment on this machine, stop them, and print what was compiled.

    Args:
        values: settings, as of a launch.
    Returns:
        The exit code.
    Raises:
        ConfigError: there are fewer GPUs than ranks, or the settings are invalid.
    """
    config = Config.from_mapping(values)
    folders = kernel_caches()
    _require_gpus(config, folders)
    print(f"compiling the kernels of {config.model}; each of FlashInfer's takes about a minute", flush=True)
    before = {name: _compiled(folder, _LIBRARIES[name]) for name, folder in folders.items()}
    begin = time.monotonic()
    from raycache.llm import LLM

    settings = {**values, **_OVERRIDES}
    LLM(settings.pop("model"), **settings).close()
    seconds = time.monotonic() - begin
    after = {name: _compiled(folder, _LIBRARIES[name]) for name, folder in folders.items()}
    print(report(folders, before=before, after=after, seconds=seconds))
    return 0


def _require_gpus(config: Config, folders: Mapping[str, Path]) -> None:
    if config.device == "cpu":
        raise ConfigError("prepare compiles kernels for GPUs; device=cpu has none to compile")
    from raycache.parallel.devices import require_gpus

    try:
        require_gpus(config.world_size)
    except ConfigError as cause:
        reason = str(cause).removesuffix("; or use --device cpu").removesuffix("; use a smaller split, or --device cpu")
        raise ConfigError(
            f"prepare runs on the GPUs of the deployment: {reason}. Run it on a machine that has them, with the same "
            f"settings and packages, and copy {' and '.join(map(str, folders.values()))} from there"
        ) from cause


def _compiled(folder: Path, pattern: str) -> dict[Path, int]:
    """Compiled kernels in a folder, and their bytes."""
    return {path: path.stat().st_size for path in folder.rglob(pattern)}


def report(
    folders: Mapping[str, Path],
    *,
    before: Mapping[str, Mapping[Path, int]],
    after: Mapping[str, Mapping[Path, int]],
    seconds: float,
) -> str:
    """What was compiled, as a text.

    Args:
        folders: library -> where it keeps kernels.
        before, after: library -> compiled kernels and their bytes.
        seconds: that the start of the ranks took.
    """
    rows, names = [], Counter[str]()
    for name, folder in folders.items():
        new = after[name].keys() - before[name].keys()
        names.update(path.stem for path in new)
        rows.append((name, len(new), len(after[name]), human_bytes(sum(after[name].values())), folder))
    lines = [f"{name} ({count})" if count > 1 else name for name, count in sorted(names.items())]
    table = render(("LIBRARY", "COMPILED", "KERNELS", "SIZE", "FOLDER"), rows=rows)
    if not lines:
        return f"{table}\n\nall kernels were already compiled; the ranks started in {seconds:.1f} s"
    total = counted(names.total(), "kernel")
    return (
        "\n".join([*lines, "", table])
        + f"\n\ncompiled {total} in {seconds:.1f} s, loading the model included. Later starts on this machine with the "
        "same settings compile none; for machines with the same GPUs and packages, copy the folders"
    )
