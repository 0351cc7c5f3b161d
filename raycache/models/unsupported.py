"""Published families that are not supported, and what they need that RayCache does not have."""

from __future__ import annotations

from collections.abc import Mapping

_V4 = "attention over compressed entries of the cache, hyper-connections, and routing by token id"

NEEDS: Mapping[str, str] = {
    "cohere2": "a layer norm, and attention and MLP beside each other",
    "deepseek_ref": _V4,
    "deepseek_v4": _V4,
    "exaone4": "norms behind attention and MLP alone",
    "gemma2": "a soft cap of attention scores",
    "glm5_next": "hyper-connections, and an indexer over groups of keys",
    "jamba": "Mamba layers of the first version",
    "llama4": "attention in chunks, and a temperature of queries that grows with the position",
    "mamba": "Mamba layers of the first version",
    "mimo_v2_flash": "values of another size than keys",
    "minimax_m3": "attention over blocks of keys that an indexer selects",
    "nemotron-nas": "layers of different sizes, some without attention",
    "olmo2": "norms behind attention and MLP alone",
    "olmo3": "norms behind attention and MLP alone",
    "phi3": "query, key and value in one matrix",
    "step3p7": "a gate per attention head and sizes that differ between layers",
}
"""model_type -> what is missing."""
