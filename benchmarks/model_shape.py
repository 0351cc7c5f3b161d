"""Published shapes of models as files of benchmarks/shapes, and the work that they ask for."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raycache.checkpoint.quantisation import Quantisation, read_quantisation
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.weights_form import weights_form
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
        last_plain, last_routed: those of the last layer's feed-forward block, which only sampled tokens meet.
        plain_bytes, routed_bytes: of all plain and all routed numbers in memory.
        itemsize: bytes of a plain weight and of a cached number.
    """

    model_dir: Path
    model: ModelConfig
    file: dict[str, Any]
    plain: int
    routed: int
    head: int
    last_plain: int
    last_routed: int
    plain_bytes: float
    routed_bytes: float
    itemsize: int

    @classmethod
    def make(
        cls,
        name: str,
        folder: Path,
        *,
        layers: int,
        is_tiny: bool,
        dtype: torch.dtype,
        weights: str = "auto",
        device_type: str = "cuda",
    ) -> ModelShape:
        """Write config.json of a shape.

        Args:
            name: of a file in `SHAPES`.
            folder: that gets a model directory of that name.
            layers: first ones that are kept; 0 for all.
            is_tiny: shrink everything to what runs anywhere.
            dtype: of plain weights and cache.
            weights: form of those that the shape has quantised, as the setting of this name.
            device_type: "cpu" or "cuda".
        """
        file = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
        if layers:
            file = _cut(file, layers)
        if is_tiny:
            file = _shrink(file)
        model_dir = folder / f"{name}-{weights}"
        model_dir.mkdir(parents=True)
        (model_dir / "config.json").write_text(json.dumps(file), encoding="utf-8")
        model = read_config(model_dir)
        sizes, held = _Sizes.of(model), _Held.of(model_dir, weights, dtype=dtype, device_type=device_type)
        return cls(
            model_dir,
            model,
            file,
            plain=sum(sizes.plain.values()),
            routed=sum(sizes.routed.values()),
            last_plain=sum(size for name, size in sizes.plain.items() if name in sizes.last),
            last_routed=sum(size for name, size in sizes.routed.items() if name in sizes.last),
            head=sizes.head,
            plain_bytes=sum(size * held.bytes_of(name) for name, size in sizes.plain.items()),
            routed_bytes=sum(size * held.bytes_of(name) for name, size in sizes.routed.items()),
            itemsize=dtype.itemsize,
        )

    @property
    def weight_bytes(self) -> float:
        """Of the whole model but for the embedding, of which a step reads a few rows."""
        return self.plain_bytes + self.routed_bytes + self.itemsize * self.head

    def step_weight_bytes(self, batch: int) -> float:
        """That a decode step has to read: of the routed experts those that some token chose, if all are as likely."""
        share = 1 - (1 - self._expert_share) ** batch
        return self.plain_bytes + self.routed_bytes * share + self.itemsize * self.head

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
        every = 2 * (self.plain + self.routed * self._expert_share)
        last = 2 * (self.last_plain + self.last_routed * self._expert_share)
        mixing = sum(self._mixing_flops(part, tokens) for part in self._components)
        return tokens * (every - last) + last + 2 * self.head + mixing

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


@dataclass(frozen=True)
class _Held:
    """How matrices are held in memory.

    Attributes:
        quantisation: of the shape, or None.
        stored: whether its first format is kept.
        itemsize: bytes of a plain number.
    """

    quantisation: Quantisation | None
    stored: bool
    itemsize: int

    @classmethod
    def of(cls, model_dir: Path, weights: str, *, dtype: torch.dtype, device_type: str) -> _Held:
        quantisation = read_quantisation(model_dir)
        if quantisation is None:
            return cls(None, False, dtype.itemsize)
        form = weights_form(quantisation, weights, dtype=dtype, device_type=device_type)
        return cls(quantisation, quantisation.schemes[0].format in form.stored, dtype.itemsize)

    def bytes_of(self, name: str) -> float:
        """Bytes per number of a tensor, scales included."""
        if self.quantisation is None or not self.stored or _PLAIN.search(name) or name.endswith("bias"):
            return self.itemsize
        if self.quantisation.excludes(name.removesuffix(".weight")):
            return self.itemsize
        if self.quantisation.schemes[0].format is Format.MXFP4:
            return 1 / 2 + 1 / 32 if ".experts." in name else self.itemsize
        return 1 + 4 / 128**2 if ".experts." in name else 1 + 4 / 128


_PLAIN = re.compile(r"norm|\.gate\.|router|kv_b_proj|weights_proj|conv1d|A_log")
"""Tensors that are plain in quantised models, and those that are used as numbers."""
_FEED_FORWARD = re.compile(r"\.(\w*mlp|block_sparse_moe|feed_forward)\.")


@dataclass(frozen=True)
class _Sizes:
    """Numbers in the tensors of a model, by name: those that every token meets, of routed experts; and of the head.

    Attributes:
        last: tensors of the last layer that meet only the tokens to sample after.
    """

    plain: dict[str, int]
    routed: dict[str, int]
    head: int
    last: frozenset[str]

    @classmethod
    def of(cls, model: ModelConfig) -> _Sizes:
        asked = AskedShapes()
        ctx = ParallelContext.single(torch.device("meta"))
        load_model(model, asked, ctx, torch.float32, on_progress=lambda done, total: None)
        sizes = {name: math.prod(shape) for name, shape in asked.shapes.items()}
        head = "lm_head.weight" if not model.tie_word_embeddings else next(name for name in sizes if "embed" in name)
        inner = {name: size for name, size in sizes.items() if "embed" not in name and name != "lm_head.weight"}
        routed = {name: size for name, size in inner.items() if ".experts." in name}
        plain = {name: size for name, size in inner.items() if name not in routed}
        layer, parts = model.num_layers - 1, components(model, CacheFormat("float32"))
        mixes = any(layer in part.layers for part in parts)
        own = (name for name in inner if f"layers.{layer}." in name)
        last = frozenset(name for name in own if not mixes or _FEED_FORWARD.search(name))
        return cls(plain, routed, sizes[head], last)


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
