"""How large each layer of a model is, from its config alone: what its family would read, counted instead of read."""

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
"""Tokens of a sequence whose cache a layer's cost counts."""

_ITEMSIZE, _FORMAT = 2, CacheFormat("bfloat16")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class LayerSizes:
    """Numbers in the weights of a model, without its draft.

    Attributes:
        held: per layer, and the embedding first and the head last.
        read: the same, but of routed experts those that one token chooses.
    """

    held: LayerCosts
    read: LayerCosts


def layer_sizes(model: ModelConfig) -> LayerSizes:
    """Count the weights of each layer; takes no memory for them."""
    counted, ctx = AskedShapes(), ParallelContext.single(torch.device("meta"))
    weights = ShardedWeights(counted, ctx, torch.float32)
    family_of(model).load(model, weights, on_progress=lambda done, total: None)
    share = _Share.of(model)
    held, read = Counter[int | str](), Counter[int | str]()
    for name, shape in counted.shapes.items():
        found = _LAYER.search(name)
        places: list[int | str] = [int(found[1])] if found else ["first"] if "embed" in name else ["last"]
        if places == ["first"] and model.tie_word_embeddings:
            places.append("last")
        for place in places:
            held[place] += math.prod(shape)
            read[place] += share.of_tensor(name, shape)
    return LayerSizes(*(_costs(sizes, model.num_layers) for sizes in (held, read)))


def layer_costs(model: ModelConfig) -> LayerCosts:
    """Bytes that a decode step reads per layer for one sequence of `CONTEXT` tokens, everything in 16 bits.

    The first stage is charged the embedding, of which a step reads few rows but which takes its memory; the last one
    the head and the draft.
    """
    sizes = layer_sizes(model).read
    costs = [_ITEMSIZE * size for size in sizes.layers]
    behind = _ITEMSIZE * sizes.last
    if model.draft is not None:
        drafts = layer_costs(model.draft.model) if model.draft.kind is DraftKind.MODEL else None
        # Prediction layers and heads are made like a layer of their target.
        behind += sum(drafts.of_stages([len(drafts.layers)])) if drafts else costs[-1] * model.draft.model.num_layers
    for part in components(replace(model, draft=None), _FORMAT):
        row = sum(field.num_bytes for field in part.fields)
        rows = 1 if part.reuse is Reuse.STATE_HERE else min(CONTEXT, part.window or CONTEXT)
        for layer in part.layers:
            costs[layer] += row * rows
    return LayerCosts(tuple(costs), first=_ITEMSIZE * sizes.first, last=behind)


@dataclass(frozen=True)
class _Share:
    """Of routed experts, what a token reads."""

    top_k: int
    count: int

    @classmethod
    def of(cls, model: ModelConfig) -> _Share:
        experts = [value for value in vars(model).values() if isinstance(value, ExpertConfig)]
        return cls(experts[0].top_k, experts[0].count) if experts else cls(1, 1)

    def of_tensor(self, name: str, shape: Sequence[int]) -> int:
        """Numbers of a tensor that a token reads; experts are tensors of all of them, or numbered."""
        layer = _LAYER.search(name)
        is_stacked = len(shape) == 3 and shape[0] == self.count
        is_expert = layer is not None and (is_stacked or _EXPERT.search(name, layer.end() - 1) is not None)
        return math.prod(shape) * self.top_k // self.count if is_expert else math.prod(shape)


class AskedShapes:
    """A weight source that notes what it is asked for; its tensors have no numbers.

    Attributes:
        shapes: of the tensors so far, by name.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        """Whether published checkpoints have a tensor of this name."""
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
