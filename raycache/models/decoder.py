"""Decoders: an embedding, layers of mixers with residual connections, a norm and a head.

Families (one file per model_type) define their layers; loading and running a decoder is the same for all and is here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ModelConfig
from raycache.layers.cp_split import CpSplit
from raycache.layers.embedding import VocabEmbedding, VocabHead
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.norm import RMSNorm
from raycache.layers.weights import ShardedWeights
from raycache.models.truncation import kind_of, num_layers_needed

Progress = Callable[[int, int], None]
"""Called while weights load: (layers loaded, layers of this stage)."""

# Shapes in this file: T packed tokens, N tokens to sample after, C hidden size, V vocabulary.


class Norm(Protocol):
    """A norm of hidden states."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, C]."""
        ...

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of hidden + delta, hidden + delta); may overwrite delta."""
        ...


MakeNorm = Callable[[Tensor, float], Norm]
"""(weight, rms_norm_eps) -> norm."""


class Residual:
    """hidden + scale * after(mixer(before(hidden))), where `before` and `after` are norms."""

    def __init__(self, before: Norm, mixer: Mixer, *, after: Norm | None = None, scale: float = 1.0) -> None:
        self._before = before
        self._mixer = mixer
        self._after = after
        self._scale = scale

    @property
    def is_position_wise(self) -> bool:
        return self._mixer.is_position_wise

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return _sum(*self.defer(hidden, None, run))

    def defer(self, hidden: Tensor, delta: Tensor | None, run: ForwardPass) -> tuple[Tensor, Tensor | None]:
        """Run on hidden + delta, and leave the final addition to the next part, whose norm can be fused with it.

        Args:
            hidden: [T, C].
            delta: [T, C], may be overwritten; or None.
        Returns:
            (hidden, delta) for the next part.
        """
        if delta is None:
            x = self._before(hidden)
        else:
            x, hidden = self._before.add(hidden, delta)
        out = self._mixer(x, run)
        if self._after is not None:
            out = self._after(out)
        return (hidden, out) if self._scale == 1.0 else (hidden + out * self._scale, None)

    def over_cp(self, split: CpSplit) -> Residual:
        """The same around a mixer that is split over cp."""
        return Residual(self._before, self._mixer.over_cp(split), after=self._after, scale=self._scale)


@dataclass(frozen=True)
class Scales:
    """Factors of a decoder's embeddings and logits.

    Attributes:
        logits, logit_cap: factor and soft cap of the logits, see `VocabHead`.
    """

    embedding: float = 1.0
    logits: float = 1.0
    logit_cap: float | None = None


UNSCALED = Scales()


class _Skipped:
    """Stands for a part of a layer that is not run."""

    is_position_wise = True

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        return hidden

    def over_cp(self, split: CpSplit) -> _Skipped:
        return self


class Decoder:
    """One rank's share of a decoder.

    Args:
        layers: index in the whole model -> parts of the layer; those of this stage, to be run in order.
        embedding: on the first stage.
        norm, head: on the last stage.
        scales: the head itself applies those of logits.
        signature: index of a layer -> what else than its parts decides which kernels it launches.
        embedding_name: tensor of the embedding, which a draft model may need on the last stage.
        hidden_size: number of features to record for a draft model, the first ones of the hidden state; None for all.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[Mixer]],
        *,
        embedding: VocabEmbedding | None,
        norm: Norm | None,
        head: VocabHead | None,
        scales: Scales = UNSCALED,
        signature: Callable[[int], Hashable] = lambda layer: None,
        embedding_name: str = "",
        hidden_size: int | None = None,
    ) -> None:
        begins = itertools.accumulate(map(len, layers.values()), initial=0)
        self._layer_at = dict(zip(begins, layers, strict=False))
        """Where the parts of each layer begin."""
        self._parts = tuple(part for parts in layers.values() for part in parts)
        mixing = [index for index, part in enumerate(self._parts) if not part.is_position_wise]
        self._tail = mixing[-1] + 1 if mixing else 0
        """Where the parts begin that compute each token by itself."""
        self._signature = signature
        self.embedding = embedding
        self._norm = norm
        self.head = head
        self.embedding_name = embedding_name
        self._hidden_size = hidden_size
        self._scales = scales

    def sharing(self, layers: Sequence[Sequence[Mixer]], *, embedding: VocabEmbedding, norm: Norm) -> Decoder:
        """A decoder of other layers, with this one's head and scales."""
        return Decoder(dict(enumerate(layers)), embedding=embedding, norm=norm, head=self.head, scales=self._scales)

    def over_cp(self, split: CpSplit) -> Decoder:
        """The same decoder for decode steps that compute all tokens on every cp rank, with weights split over cp.

        The embedding is not split: few of its rows are read.

        Raises:
            NotSplitError: a layer cannot be split.
        """
        own = copy(self)
        own._parts = tuple(part.over_cp(split) for part in self._parts)
        own.head = None if self.head is None else self.head.over_cp(split)
        return own

    @property
    def num_layers_needed(self) -> int:
        """First layers that launch all kernels of this stage (truncation.py)."""
        begins = [*self._layer_at, len(self._parts)]
        return num_layers_needed(
            [
                (self._signature(layer), tuple(map(kind_of, self._parts[begin:end])))
                for layer, begin, end in zip(self._layer_at.values(), begins, begins[1:], strict=False)
            ]
        )

    def truncated(self, num_layers: int) -> Decoder:
        """The same decoder, of which only the first layers run. Its outputs mean nothing, but have the same shapes.

        Args:
            num_layers: at least `num_layers_needed`.
        """
        count = [*self._layer_at, len(self._parts)][num_layers]
        own = copy(self)
        own._parts = self._parts[:count] + (_Skipped(),) * (len(self._parts) - count)
        return own

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, C]; first stage only."""
        assert self.embedding is not None, "only the first stage embeds tokens"
        hidden = self.embedding(ids)
        if self._scales.embedding == 1.0:
            return hidden
        # Rounded to the dtype, as in training; as a number, since a tensor would be copied to the device every time.
        return hidden * torch.tensor(self._scales.embedding, dtype=hidden.dtype).item()

    def forward(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """Run this stage's layers: [T, C] -> new [T, C], or [K, C] of the wanted tokens."""
        delta: Tensor | None = None
        for index, part in enumerate(self._parts):
            if index == self._tail and run.wanted is not None:
                hidden, delta = hidden[run.wanted], None if delta is None else delta[run.wanted]
            if run.records and self._layer_at.get(index) in run.records:
                hidden, delta = _sum(hidden, delta), None
                run.recorded.append(hidden[:, : self._hidden_size].clone())
            if isinstance(part, Residual):
                hidden, delta = part.defer(hidden, delta, run)
            else:
                hidden, delta = part(_sum(hidden, delta), run), None
        hidden = _sum(hidden, delta)
        return hidden if run.wanted is None or self._tail < len(self._parts) else hidden[run.wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V], at least float32; last stage only."""
        return self.score(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, [N, C] -> new [N, C]; last stage only."""
        assert self._norm is not None, "only the last stage computes logits"
        return self._norm(hidden)

    def score(self, normed: Tensor) -> Tensor:
        """Logits of the result of `normed`."""
        assert self.head is not None, "only the last stage computes logits"
        return self.head(normed)


def _sum(hidden: Tensor, delta: Tensor | None) -> Tensor:
    """hidden + delta; overwrites delta."""
    return hidden if delta is None else delta.add_(hidden)


def pre_norm_layer(
    config: ModelConfig,
    weights: ShardedWeights,
    attention: Mixer,
    block: Mixer,
    *,
    make_norm: MakeNorm = RMSNorm,
    scale: float = 1.0,
) -> tuple[Residual, Residual]:
    """The layer of most decoders: attention and a feed-forward block, each after a norm and with a residual connection.

    Args:
        weights: of the layer, for its norms.
        scale: factor of the outputs of both.
    """
    before, between = (
        make_norm(weights.whole(f"{name}.weight", config.hidden_size), config.rms_norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Residual(before, attention, scale=scale), Residual(between, block, scale=scale)


@dataclass(frozen=True)
class Names:
    """Names of a decoder's tensors; `layers` is the prefix of those of the layers."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


NAMES = Names()


def load_decoder(
    config: ModelConfig,
    weights: ShardedWeights,
    *,
    load_layer: Callable[[int, ShardedWeights], Sequence[Mixer]],
    on_progress: Progress,
    make_norm: MakeNorm = RMSNorm,
    names: Names = NAMES,
    scales: Scales = UNSCALED,
) -> Decoder:
    """Load this rank's share of a decoder.

    Args:
        weights: of the whole model.
        load_layer: (index in the whole model, weights of the layer) -> parts of the layer.
        make_norm: makes the final norm.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    ctx = weights.ctx
    stage = ctx.layers(config.num_layers)
    vocab = {"vocab_size": config.vocab_size, "features": config.hidden_size}
    is_tied = config.tie_word_embeddings
    table = head = norm = None
    if ctx.is_first_stage or (ctx.is_last_stage and is_tied):
        table = weights.vocab(names.embedding, **vocab)
    if ctx.is_last_stage:
        norm = make_norm(weights.whole(names.norm, config.hidden_size), config.rms_norm_eps)
        rows = table if is_tied and table is not None else weights.vocab(names.head, **vocab)
        head = VocabHead(rows, config.vocab_size, ctx.tp, cap=scales.logit_cap, factor=scales.logits)
    layers = {}
    for layer in stage:
        layers[layer] = load_layer(layer, weights.under(f"{names.layers}.{layer}"))
        on_progress(len(layers), len(stage))
    return Decoder(
        layers,
        embedding=VocabEmbedding(table, ctx.tp) if ctx.is_first_stage and table is not None else None,
        norm=norm,
        head=head,
        scales=scales,
        signature=config.layer_signature,
        embedding_name=names.embedding,
        hidden_size=config.hidden_size,
    )
