"""Servers whose answers are known to be right, with pools so small that hits come from every tier they have.

A prompt of `raycache cachecheck --prompt-tokens 60` has 60 to 700 tokens. The device has room for two or three of the
long ones and the host for about ten, so that the scenario `evicted` finds one prompt in the host tier and one in the
storage. Requests wait for the storage: otherwise such short prompts are computed before it answers.

They are whole servers without Ray, whose start takes longer than a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.demo.model import make_demo_model

_SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Server:
    """A model and how it is served.

    Attributes:
        model: directory, or `_SMOLLM2`.
        settings: beside those of the storage.
    """

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def served(self, work: Path, *, smollm2: Path) -> Iterator[str]:
        """Serve it; gives the URL.

        Args:
            work: an empty directory, for the storage.
            smollm2: directory to which SmolLM2 is converted from its package, unless that was done.
        """
        from tests.oracle.stepped_server import served

        model = make_demo_model(smollm2) if self.model == _SMOLLM2 else Path(self.model)
        storage = {"storage": f"file://{work}/storage?size=1GiB", "prefetch": "wait_complete"}
        with served(model, page_size=16, **storage, **self.settings) as url:
            yield url


def _kda(host_kib: int = 1536, **settings: Any) -> Server:
    return _hybrid("kda_mla", host_kib, settings)


def _mamba(host_kib: int = 2560, **settings: Any) -> Server:
    return _hybrid("mamba2_gqa", host_kib, settings)


def _hybrid(name: str, host_kib: int, settings: Mapping[str, Any]) -> Server:
    """About 240 pages on the host."""
    pools = {"restore_interval": 256, "num_pages": 60, "host_memory": f"{host_kib}KiB"}
    return Server(f"demos/hybrids/{name}", {**pools, **settings})


def _smollm2(**settings: Any) -> Server:
    """Its prompts have half as many tokens; 110 pages on the host."""
    return Server(_SMOLLM2, {"num_pages": 48, "host_memory": "78MiB", **settings})


SERVERS: Mapping[str, Server] = {
    "smollm2": _smollm2(),
    "smollm2-cp2": _smollm2(cp=2),
    "smollm2-pp2-ngram": _smollm2(pp=2, draft="ngram"),
    "smollm2-tp3": _smollm2(tp=3),  # of 9 heads; 2 do not divide them
    "kda_mla-tp2": _kda(tp=2),
    "kda_mla-cp2": _kda(1024, cp=2, dtype="bfloat16"),
    "kda_mla-pp2-ngram": _kda(pp=2, draft="ngram"),
    "kda_mla-tp2-cp2": _kda(tp=2, cp=2),
    "mamba2_gqa-tp2-ngram": _mamba(tp=2, draft="ngram"),
    "mamba2_gqa-cp2": _mamba(3072, cp=2, write_policy="write_back"),
    "mamba2_gqa-pp2": _mamba(1536, pp=2, dtype="bfloat16"),
    "mamba2_gqa-tp2-cp2": _mamba(tp=2, cp=2),
}
