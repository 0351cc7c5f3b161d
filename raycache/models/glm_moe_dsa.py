"""GLM-5: DeepSeek-V3.2 in which some layers share the selection of an earlier layer's indexer."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError
from raycache.layers.indexer import read_indexer
from raycache.models.deepseek_v3 import DeepseekConfig, DeepseekV3, read_deepseek


class GlmMoeDsa(DeepseekV3):
    """The layers of DeepSeek-V3, some with an indexer."""

    model_type = "glm_moe_dsa"

    def read_config(self, file: ConfigFile) -> DeepseekConfig:
        """The rope of attention and indexers is interleaved."""
        for key in ("rope_interleave", "indexer_rope_interleave"):
            file.require(key, True)
        indexer = read_indexer(file, sources=_read_sources(file), is_interleaved=True)
        return read_deepseek(file, indexer=indexer)


def _read_sources(file: ConfigFile) -> list[int]:
    """For each layer, the layer whose indexer it uses: itself or the last one before it that has one."""
    sources: list[int] = []
    for layer, kind in enumerate(_read_indexer_types(file)):
        if kind == "full":
            sources.append(layer)
        elif sources:
            sources.append(sources[-1])
        else:
            raise CheckpointError(f"{file.path}: layer 0 has no indexer of its own, and no layer before it has one")
    return sources


def _read_indexer_types(file: ConfigFile) -> tuple[str, ...]:
    """Read a list of kinds or letters; or a period: the first `offset` layers are full, then every `freq`-th one."""
    pattern = file.raw("index_topk_pattern")
    if isinstance(pattern, str):
        letters = {"F": "full", "S": "shared"}
        file = file.having(index_topk_pattern=[letters.get(letter, letter) for letter in pattern])
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = read_given_layer_types(file, key=key, known=("full", "shared"))
        if kinds:
            return kinds
    freq, offset = file.integer("index_topk_freq", 1), file.integer("index_skip_topk_offset", 2)
    layers = range(file.integer("num_hidden_layers"))
    return tuple("shared" if max(layer - offset + 1, 0) % freq else "full" for layer in layers)
