"""RayCache: serve large language models with one hierarchical KV cache.

from raycache import LLM, SamplingParams

with LLM("path/to/model") as llm:
    print(llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raycache.config import Config
from raycache.errors import RayCacheError
from raycache.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from raycache.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Config", "FinishReason", "RayCacheError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes a second to import, and the command line does not need it for --help.
    if name in ("LLM", "Completion"):
        from raycache import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'raycache' has no attribute {name!r}")
