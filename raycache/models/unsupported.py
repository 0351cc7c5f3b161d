"""Published families that are not supported, and the features that they need."""

from __future__ import annotations

from collections.abc import Mapping

_V4 = "attention over compressed entries of the cache, hyper-connections, and routing by token id"

NEEDS: Mapping[str, str] = {
    "cohere2": "a layer norm, and attention and MLP in parallel",
    "deepseek_ref": _V4,
    "deepseek_v4": _V4,
    "exaone4": "norms only after attention and MLP",
    "gemma2": "a soft cap of attention scores",
    "glm5_next": "hyper-connections, and an indexer over groups of keys",
    "jamba": "Mamba layers of the first version",
    "llama4": "chunked attention, and a query temperature that depends on the position",
    "mamba": "Mamba layers of the first version",
    "mimo_v2_flash": "keys and values of different sizes",
    "minimax_m3": "attention over blocks of keys that an indexer selects",
    "nemotron-nas": "layers of different sizes, some without attention",
    "olmo2": "norms only after attention and MLP",
    "olmo3": "norms only after attention and MLP",
    "phi3": "query, key and value in one matrix",
    "step3p7": "a gate per attention head and sizes that differ between layers",
}
"""model_type -> missing features."""
