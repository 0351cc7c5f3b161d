"""Published shapes of models as files of benchmarks/shapes, and the work that they ask for."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raycache.memory.component import CacheFormat, Component, Reuse
from raycache.models.base import ModelConfig, components, load_model, read_config
from raycache.models.layer_sizes import AskedShapes
from raycache.parallel.context import ParallelContext

SHAPES = Path(__file__).with_name("shapes")

_PER_LAYER = ("layer_types", "hybrid_override_pattern")
_KDA_LAYERS = ("kda_layers", "full_attn_layers")  # count from 1
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_heads": 8,
    "head_dim": 16,
    "vocab_size": 512,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 64,
    "sliding_window": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
"""Largest values of a shape that is only to be run, not measured."""


@dataclass(frozen=True)
class ModelShape:
    """A model without numbers.

    Attributes:
        model_dir: with its config.json.
        model: as the project reads it.
        file: config.json.
        plain, routed, head: numbers in its weights: those that every token meets, of routed experts, of the head.
        itemsize: bytes of a weight and of a cached number.
    """

    model_dir: Path
    model: ModelConfig
    file: dict[str, Any]
    plain: int
    routed: int
    head: int
    itemsize: int

    @classmethod
    def make(cls, name: str, folder: Path, *, layers: int, is_tiny: bool, dtype: torch.dtype) -> ModelShape:
        """Write config.json of a shape.

        Args:
            name: of a file in `SHAPES`.
            folder: that gets a model directory of that name.
            layers: first ones that are kept; 0 for all.
            is_tiny: shrink everything to what runs anywhere.
            dtype: of weights and cache.
        """
        file = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
        if layers:
            file = _cut(file, layers)
        if is_tiny:
            file = _shrink(file)
        model_dir = folder / name
        model_dir.mkdir(parents=True)
        (model_dir / "config.json").write_text(json.dumps(file), encoding="utf-8")
        model = read_config(model_dir)
        counts = _count(model)
        return cls(model_dir, model, file, **counts, itemsize=dtype.itemsize)

    @property
    def weight_bytes(self) -> int:
        """Of the whole model but for the embedding, of which a step reads a few rows."""
        return self.itemsize * (self.plain + self.routed + self.head)

    def step_weight_bytes(self, batch: int) -> float:
        """That a decode step has to read: of the routed experts those that some token chose, if all are as likely."""
        share = 1 - (1 - self._expert_share) ** batch
        return self.itemsize * (self.plain + self.routed * share + self.head)

    def step_cache_bytes(self, context: float) -> float:
        """That a decode step has to read of one sequence of `context` tokens; recurrent states are written as well."""
        total = 0.0
        for part in self._components:
            row = len(part.layers) * sum(field.num_bytes for field in part.fields)
            total += row * (2 if part.reuse is Reuse.STATE_HERE else min(context, self._reach(part)))
        return total

    def move_bytes(self, tokens: int) -> float:
        """Of the state that a prefix of `tokens` needs to be continued."""
        rows = (
            (len(part.layers) * sum(field.num_bytes for field in part.fields), part.window, part.reuse)
            for part in self._components
        )
        return sum(
            row * (1 if reuse is Reuse.STATE_HERE else min(tokens, window or tokens)) for row, window, reuse in rows
        )

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt of `tokens`, from which one token is sampled: products with weights, and attention."""
        per_token = 2 * (self.plain + self.routed * self._expert_share)
        return tokens * per_token + 2 * self.head + sum(self._mixing_flops(part, tokens) for part in self._components)

    @property
    def _components(self) -> tuple[Component, ...]:
        dtype = {2: "bfloat16", 4: "float32"}[self.itemsize]
        return components(self.model, CacheFormat(dtype))

    @property
    def _expert_share(self) -> float:
        """Of the routed experts, that one token chooses."""
        count = _first(self.file, "n_routed_experts", "num_experts", "num_local_experts")
        return _first(self.file, "num_experts_per_tok", "num_experts_per_token") / count if count else 0.0

    def _reach(self, part: Component) -> float:
        """Most tokens of a component that one query reads."""
        top_k = _first(self.file, "index_topk")
        return top_k if top_k and part.name == "latent" else part.window or math.inf

    def _mixing_flops(self, part: Component, tokens: int) -> float:
        """Of attention or recurrence in all layers of a component; a multiplication and an addition count as two."""
        file, reach = self.file, min(tokens, self._reach(part))
        pairs = reach * (reach + 1) / 2 + (tokens - reach) * reach
        heads = file["num_attention_heads"]
        if part.reuse is Reuse.STATE_HERE:
            work = 4 * math.prod(part.fields[-1].shape) * tokens  # the state's update and its product with the query
        elif part.name == "latent":
            work = 2 * heads * (file["qk_nope_head_dim"] + file["qk_rope_head_dim"] + file["v_head_dim"]) * pairs
        elif part.name == "index":
            work = 2 * file["index_n_heads"] * file["index_head_dim"] * pairs
        else:
            work = 4 * heads * part.fields[0].shape[-1] * pairs
        return work * len(part.layers)


def _count(model: ModelConfig) -> dict[str, int]:
    names = AskedShapes()
    ctx = ParallelContext.single(torch.device("meta"))
    load_model(model, names, ctx, torch.float32, on_progress=lambda done, total: None)
    found = {"plain": 0, "routed": 0, "head": 0}
    for name, shape in names.shapes.items():
        size = math.prod(shape)
        is_embedding = "embed" in name
        if is_embedding and not model.tie_word_embeddings:
            continue
        kind = "routed" if ".experts." in name else "head" if is_embedding or name == "lm_head.weight" else "plain"
        found[kind] += size
    return found


def _cut(file: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first layers."""
    layers = min(layers, file["num_hidden_layers"])
    kept = {key: file[key][:layers] for key in _PER_LAYER if key in file}
    if "linear_attn_config" in file:
        linear = file["linear_attn_config"]
        listed = {key: [layer for layer in linear[key] if layer <= layers] for key in _KDA_LAYERS}
        kept["linear_attn_config"] = {**linear, **listed}
    return {**file, **kept, "num_hidden_layers": layers}


def _shrink(file: dict[str, Any]) -> dict[str, Any]:
    def shrunk(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _shrink(value)
        return min(value, _TINY[key]) if key in _TINY and isinstance(value, int) else value

    return {key: shrunk(key, value) for key, value in file.items()}


def _first(file: dict[str, Any], *keys: str) -> int:
    """The value of the first key that is there, or 0."""
    return next((int(file[key]) for key in keys if file.get(key) is not None), 0)
