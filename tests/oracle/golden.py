"""What transformers, or a twin of what it lacks, computes in true float64, and how far float32 may be from it.

`model.double()` is no float64: norms, softmax, routers and recurrences cast to float32 within. Here those casts are
redirected. Always one sequence at a time with explicit positions: some models take them from the wrong cache layer, and
left padding changes what others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import tests.oracle.plain_torch  # noqa: F401  # before models are imported
from tests.oracle.kimi_k3 import KimiK3Twin, is_kimi_k3
from tests.oracle.quantised import PLAIN
from tests.oracle.ring_2_5 import Ring25, is_ring
from tests.oracle.twin_cache import TwinCache

Array = NDArray[np.float64]

# Shapes in this file: T tokens of one sequence, V vocabulary, H heads, D head size.


@dataclass(frozen=True)
class Golden:
    """Teacher-forced logits of some sequences.

    Attributes:
        logits: [T, V] float64 of each sequence: what follows after every one of its tokens.
        noise: largest difference to float64 of any logit in float32, with sums in the usual order and in four parts.
        gap: smallest distance of a score that a router or an indexer chose to the best one that it did not; infinite
            without them. Near the noise, a correct implementation may choose another one: draw other tokens.
    """

    logits: list[Array]
    noise: float
    gap: float

    @property
    def atol(self) -> float:
        """How far the logits of a correct float32 implementation may be."""
        return max(20 * self.noise, 1e-5)

    @property
    def margin(self) -> float:
        """Smallest lead of a best token over the second: below 2 * noise, float32 may choose another one."""
        return min(float((top[:, 1] - top[:, 0]).min()) for top in (np.sort(x, axis=1)[:, -2:] for x in self.logits))


def golden(model_dir: Path, sequences: Sequence[Sequence[int]]) -> Golden:
    """Compute the logits after every token of each sequence, without a cache.

    Args:
        model_dir: a checkpoint; read once per process unless its files change.
        sequences: token ids, each of length T >= 1.
    """
    single, double = _load(model_dir, torch.float32), _load(model_dir, torch.float64)
    logits, noise, choices = [], 0.0, Choices()
    for ids in sequences:
        exact = _logits(double, ids, InFloat64(), choices)
        noise = max(noise, float((_logits(single, ids) - exact).abs().max()))
        noise = max(noise, float((_logits(single, ids, SplitSums(4)) - exact).abs().max()))
        logits.append(exact.numpy())
    return Golden(logits, noise, choices.gap)


def greedy(model_dir: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Continue a prompt in float64, the best token each time.

    Tokens are found with transformers' cache; one pass without it must find them again.
    """
    model, tokens = _load(model_dir, torch.float64), list(prompt)
    logits, cache = _continue(model, tokens, cache=None, seen=0)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(logits[-1].argmax()))
        logits, cache = _continue(model, tokens[-1:], cache=cache, seen=len(tokens) - 1)
    again = _logits(model, tokens[:-1], InFloat64())[len(prompt) - 1 :].argmax(-1).tolist()
    generated = tokens[len(prompt) :]
    assert generated == again, "transformers finds other tokens with its cache than without"
    return generated


def cached_logits(model_dir: Path, ids: Sequence[int], *, num_prefill: int) -> Array:
    """Logits in float64 of a prefill of some tokens and one step for each of the others: [T, V]."""
    model = _load(model_dir, torch.float64)
    logits, cache = _continue(model, ids[:num_prefill], cache=None, seen=0)
    parts = [logits]
    for seen in range(num_prefill, len(ids)):
        logits, cache = _continue(model, ids[seen : seen + 1], cache=cache, seen=seen)
        parts.append(logits)
    return torch.cat(parts).numpy()


def cache_contents(model_dir: Path, ids: Sequence[int]) -> dict[tuple[int, str], Array]:
    """What the layers keep after a prefill, in float64, by layer and name.

    keys, values    [T, H, D]  rotated; of a window layer the last min(T, window - 1) tokens
    latent, rope    [T, rank], [T, D]  the normed latent, and the rotated key that all heads share
    index           [T, D]  rotated keys of the indexer
    conv            [channels, kernel - 1]  the last inputs, oldest first; zeros before the first token
    state           Mamba2: [H, D, state size]; gated delta net, KDA, lightning: [H, key size, value size]
    """
    model = _load(model_dir, torch.float64)
    _, cache = _continue(model, ids, cache=None, seen=0)
    has_latent = model.config.to_dict().get("kv_lora_rank") is not None
    return {key: tensor.numpy().copy() for key, tensor in _contents(cache, has_latent=has_latent).items()}


class InFloat64(TorchFunctionMode):
    """Casts to float32, and tensors made as float32, become float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with float64 wherever it was asked for float32."""
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named)


class SplitSums(TorchFunctionMode):
    """Every linear layer adds up its inputs in some parts, as ranks that each hold a part of them do."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the split form of a linear layer."""
        if func is not F.linear or args[1].shape[1] % self._num_parts:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = (*args, None)[:3]  # transformers names none of them
        parts = zip(inputs.chunk(self._num_parts, -1), weight.chunk(self._num_parts, 1), strict=True)
        total = sum(F.linear(part, part_weight) for part, part_weight in parts)
        return total if bias is None else total + bias


class Choices(TorchFunctionMode):
    """Watches how close every choice of the top k is.

    Attributes:
        gap: smallest distance seen of the k-th score to the next one; masked scores do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gap = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` and look at what a choice left out."""
        if func in (torch.topk, torch.Tensor.topk):
            scores, num_chosen = args[0], args[1] if len(args) > 1 else kwargs["k"]
            if num_chosen < scores.shape[-1]:
                last, rejected = scores.topk(num_chosen + 1).values[..., -2:].unbind(-1)
                gaps = (last - rejected)[rejected > -1e30]
                self.gap = min([self.gap, *gaps.flatten().tolist()])
        return func(*args, **(kwargs or {}))


def _load(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel | Ring25 | KimiK3Twin:
    """The model, from memory unless its files were written since; of a quantised one, what its numbers stand for."""
    model_dir = model_dir / PLAIN if (model_dir / PLAIN).exists() else model_dir
    files = [model_dir / "config.json", *model_dir.glob("*.safetensors")]
    return _load_once(model_dir, dtype, max(path.stat().st_mtime_ns for path in files))


@lru_cache(maxsize=8)
def _load_once(model_dir: Path, dtype: torch.dtype, written_ns: int) -> PreTrainedModel | Ring25 | KimiK3Twin:
    """Experts run one by one: the grouped product of the CPU knows no float64."""
    if is_ring(model_dir):
        return Ring25(model_dir, dtype)
    if is_kimi_k3(model_dir):
        return KimiK3Twin(model_dir, dtype)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.to(dtype)


@torch.no_grad()
def _logits(model: Any, ids: Sequence[int], *modes: TorchFunctionMode) -> Tensor:
    """Logits after every token, without a cache: [T] -> [T, V] of the model's type."""
    positions = torch.arange(len(ids))[None]
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return model(torch.tensor([list(ids)]), position_ids=positions, use_cache=False).logits[0]


@torch.no_grad()
def _continue(
    model: Any, ids: Sequence[int], *, cache: Cache | TwinCache | None, seen: int
) -> tuple[Tensor, Cache | TwinCache]:
    """Logits after each of some tokens that follow `seen` cached ones, in float64, and the cache with them."""
    positions = torch.arange(seen, seen + len(ids))[None]
    with InFloat64():
        out = model(torch.tensor([list(ids)]), position_ids=positions, use_cache=True, past_key_values=cache)
    return out.logits[0], out.past_key_values


def _contents(cache: Cache | TwinCache, *, has_latent: bool) -> dict[tuple[int, str], Tensor]:
    """Tensors of a cache under our names, tokens before heads."""
    if isinstance(cache, TwinCache):
        return cache.kept
    contents = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            contents[i, "conv"] = layer.conv_states[0][0, :, 1:]
            contents[i, "state"] = layer.recurrent_states[0][0]
        if isinstance(layer, DynamicLayer) and layer.keys is not None:
            names, rows = ("keys", "values"), [layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)]
            if has_latent:
                names, rows = ("latent", "rope"), [row.squeeze(1) for row in rows]
            contents.update({(i, name): row for name, row in zip(names, rows, strict=True)})
        if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
            contents[i, "index"] = layer.indexer_keys[0]
    if isinstance(cache, MiniMaxCache):
        contents.update({(i, "state"): state[0] for i, state in enumerate(cache.linear_cache) if len(state)})
    return contents
