"""Sizes of a model's layers, computed from its config alone by counting the tensors that its family would read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raycache.checkpoint.config_file import DraftKind, ModelConfig
from raycache.layers.expert_config import ExpertConfig
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Reuse
from raycache.models.base import components, family_of
from raycache.parallel.context import ParallelContext
from raycache.parallel.stages import LayerCosts

CONTEXT = 8192
"""Tokens of cached prefix that the cost of a layer includes."""

_ITEMSIZE, _FORMAT = 2, CacheFormat("bfloat16")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class LayerSizes:
    """Number of weights per layer, and of embedding and head, without the draft model.

    Attributes:
        held: all of them.
        read: those that a token uses; of routed experts only the chosen ones.
    """

    held: LayerCosts
    read: LayerCosts


def layer_sizes(model: ModelConfig) -> LayerSizes:
    """Count the weights of each layer, without allocating them."""
    counted, ctx = AskedShapes(), ParallelContext.single(torch.device("meta"))
    weights = ShardedWeights(counted, ctx, torch.float32)
    family_of(model).load(model, weights, on_progress=lambda done, total: None)
    share = _Share.of(model)
    held, read = Counter[int | str](), Counter[int | str]()
    for name, shape in counted.shapes.items():
        found = _LAYER.search(name)
        parts: list[int | str] = [int(found[1])] if found else ["first"] if "embed" in name else ["last"]
        if parts == ["first"] and model.tie_word_embeddings:
            parts.append("last")
        for part in parts:
            held[part] += math.prod(shape)
            read[part] += share.of_tensor(name, shape)
    return LayerSizes(*(_costs(sizes, model.num_layers) for sizes in (held, read)))


def layer_costs(model: ModelConfig) -> LayerCosts:
    """Bytes that a decode step reads per layer for one sequence of `CONTEXT` tokens, with everything in 16 bits.

    The first stage is also charged for the embedding, which it holds although a step reads only a few rows of it; the
    last stage for the head and the draft model.
    """
    sizes = layer_sizes(model).read
    costs = [_ITEMSIZE * size for size in sizes.layers]
    behind = _ITEMSIZE * sizes.last
    if model.draft is not None:
        drafts = layer_costs(model.draft.model) if model.draft.kind is DraftKind.MODEL else None
        # Prediction layers and EAGLE heads are about as large as a layer of their target.
        behind += sum(drafts.of_stages([len(drafts.layers)])) if drafts else costs[-1] * model.draft.model.num_layers
    for part in components(replace(model, draft=None), _FORMAT):
        row = sum(field.num_bytes for field in part.fields)
        rows = 1 if part.reuse is Reuse.STATE_HERE else min(CONTEXT, part.window or CONTEXT)
        for layer in part.layers:
            costs[layer] += row * rows
    return LayerCosts(tuple(costs), first=_ITEMSIZE * sizes.first, last=behind)


@dataclass(frozen=True)
class _Share:
    """Share of the routed experts that a token uses."""

    top_k: int
    count: int

    @classmethod
    def of(cls, model: ModelConfig) -> _Share:
        experts = [value for value in vars(model).values() if isinstance(value, ExpertConfig)]
        return cls(experts[0].top_k, experts[0].count) if experts else cls(1, 1)

    def of_tensor(self, name: str, shape: Sequence[int]) -> int:
        """Weights of a tensor that a token uses; tensors of experts are stacked, or have their number in the name."""
        layer = _LAYER.search(name)
        is_stacked = len(shape) == 3 and shape[0] == self.count
        is_expert = layer is not None and (is_stacked or _EXPERT.search(name, layer.end() - 1) is not None)
        return math.prod(shape) * self.top_k // self.count if is_expert else math.prod(shape)


class AskedShapes:
    """A weight source that records the shapes of requested tensors, and returns tensors on the meta device.

    Attributes:
        shapes: of the tensors requested so far, by name.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        """Optional tensors are never present."""
        return False

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        """Return None: tensors count as unquantised."""

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the slice on the meta device."""
        self.shapes[name] = tuple(shape)
        cut = list(shape)
        if axis is not None:
            cut[axis] = len(range(shape[axis])[start:stop])
        return torch.empty(cut, device="meta")


def _costs(sizes: Counter[int | str], num_layers: int) -> LayerCosts:
    layers = tuple(sizes[layer] for layer in range(num_layers))
    return LayerCosts(layers, first=sizes["first"], last=sizes["last"])
