"""Ring and Ling 2.5, slowly and in plain torch: what transformers has no class for.

Written from what the vendor's code and the engines compute (docs/adr/0014-ring.md), and called as a model of
transformers is, so that golden.py does with it what it does with others. One sequence at a time. Recurrent states take
one token after another, and experts one token each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from tests.oracle.twin_cache import TwinCache


def is_ring(model_dir: Path) -> bool:
    """Whether a checkpoint is one of these models."""
    config = json.loads((model_dir / "config.json").read_text())
    return "BailingMoeV2_5ForCausalLM" in (config.get("architectures") or ())


LATENT_EPS = 1e-6
"""Of the norms inside of latent attention."""

# Shapes in this file: T new tokens of one sequence, S all of it, C hidden size, H heads, D head size of the linear
# layers, V vocabulary.


class Ring25:
    """A checkpoint with published names.

    Args:
        model_dir: of it.
        dtype: that it is computed in.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        values: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
        self.config = PreTrainedConfig(**values)
        self.dtype = dtype
        self._tensors = {name: tensor.to(dtype) for name, tensor in load_file(model_dir / "model.safetensors").items()}

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        use_cache: bool,
        past_key_values: TwinCache | None = None,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """[1, T] token ids at [1, T] positions -> logits [1, T, V], last_hidden_state [1, T, C], past_key_values, and
        hidden_states: what enters each layer, [1, T, C]."""
        cache = past_key_values or TwinCache()
        hidden, entering = self.get_input_embeddings()(input_ids[0]), []
        for layer in range(self.config.num_hidden_layers):
            entering.append(hidden[None])
            hidden = self.layer(layer, hidden, position_ids[0], cache)
        hidden = self.norm(hidden, "model.norm")
        return SimpleNamespace(
            logits=self.get_output_embeddings()(hidden)[None],
            last_hidden_state=hidden[None],
            hidden_states=entering,
            past_key_values=cache,
        )

    @property
    def base_model(self) -> Ring25:
        """Itself."""
        return self

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """[T] -> [T, C]."""
        return self["model.word_embeddings.weight"].__getitem__

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """[.., C] -> [.., V]."""
        return lambda hidden: F.linear(hidden, self["lm_head.weight"])

    def predict(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The prediction layer: embedded next tokens and what the model found, normed, [T, C] each -> [T, C]."""
        number = self.config.num_hidden_layers
        at = f"model.layers.{number}"
        pair = torch.cat([self.norm(embedded, f"{at}.enorm"), self.norm(features, f"{at}.hnorm")], -1)
        joined = F.linear(pair, self[f"{at}.eh_proj.weight"])
        return self.norm(self.layer(number, joined, torch.arange(len(joined)), TwinCache()), f"{at}.final_layernorm")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def layer(self, layer: int, hidden: Tensor, positions: Tensor, cache: TwinCache) -> Tensor:
        """[T, C] -> [T, C]; layers behind the model's own have latent attention and experts."""
        at = f"model.layers.{layer}"
        num_layers, group = self.config.num_hidden_layers, self.config.layer_group_size
        is_latent = layer >= num_layers or layer % group == group - 1
        attend = self._latent if is_latent else self._lightning
        hidden = hidden + attend(layer, self.norm(hidden, f"{at}.input_layernorm"), positions, cache)
        x = self.norm(hidden, f"{at}.post_attention_layernorm")
        if layer < self.config.first_k_dense_replace:
            return hidden + mlp(x, self._tensors, f"{at}.mlp")
        return hidden + experts(x, self._tensors, f"{at}.mlp", self.config.to_dict())

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """Over the last dimension."""
        scale = (x.square().mean(-1, keepdim=True) + (eps or self.config.rms_norm_eps)).sqrt()
        return x / scale * self[f"{name}.weight"]

    def _lightning(self, layer: int, x: Tensor, positions: Tensor, cache: TwinCache) -> Tensor:
        at, heads, dim = f"model.layers.{layer}.attention", self.config.num_attention_heads, self.config.head_dim
        qkv = F.linear(x, self[f"{at}.query_key_value.weight"]).view(len(x), 3, heads, dim)
        turned = int(dim * self.config.partial_rotary_factor)
        q, k = (
            turn_halves(self.norm(qkv[:, i], f"{at}.{name}_layernorm"), positions, turned, self.config.rope_theta)
            for i, name in enumerate(("query", "key"))
        )
        state = cache.kept.get((layer, "state"), x.new_zeros(heads, dim, dim))
        decay = torch.exp(-self.slopes(layer))[:, None, None]
        found = []
        for t in range(len(x)):
            state = decay * state + k[t][:, :, None] * qkv[t, 2][:, None, :]
            found.append((state * q[t][:, :, None]).sum(1) * dim**-0.5)
        cache.kept[layer, "state"] = state
        groups = torch.stack(found).view(len(x), self.config.group_norm_size, -1)
        scale = (groups.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        normed = (groups / scale).view(len(x), -1) * self[f"{at}.g_norm.weight"]
        return F.linear(normed * torch.sigmoid(F.linear(x, self[f"{at}.g_proj.weight"])), self[f"{at}.dense.weight"])

    def slopes(self, layer: int) -> Tensor:
        """[H]: those of the checkpoint, or else of ALiBi, less in later layers."""
        stored = self._tensors.get(f"model.layers.{layer}.attention.slope")
        if stored is not None:
            return stored.abs()
        last = self.config.num_hidden_layers - 1
        share = 1 - layer / last + 1e-5 if last else 1 + 1e-5
        return torch.tensor(alibi(self.config.num_attention_heads), dtype=self.dtype) * share

    def _latent(self, layer: int, x: Tensor, positions: Tensor, cache: TwinCache) -> Tensor:
        config, at = self.config, f"model.layers.{layer}.attention"
        heads, rank, theta = config.num_attention_heads, config.kv_lora_rank, config.rope_theta
        plain, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            q = F.linear(x, self[f"{at}.q_proj.weight"])
        else:
            low = self.norm(F.linear(x, self[f"{at}.q_a_proj.weight"]), f"{at}.q_a_layernorm", LATENT_EPS)
            q = F.linear(low, self[f"{at}.q_b_proj.weight"])
        q = q.view(len(x), heads, plain + rope)
        down = F.linear(x, self[f"{at}.kv_a_proj_with_mqa.weight"])
        new = {
            "latent": self.norm(down[:, :rank], f"{at}.kv_a_layernorm", LATENT_EPS),
            "rope": turn_neighbours(down[:, rank:], positions, theta),
        }
        for name, rows in new.items():
            before = cache.kept.get((layer, name))
            cache.kept[layer, name] = rows if before is None else torch.cat([before, rows])
        latents, ropes = (cache.kept[layer, name] for name in new)
        kv = F.linear(latents, self[f"{at}.kv_b_proj.weight"]).view(len(latents), heads, plain + value)
        scores = torch.einsum("thd,shd->hts", q[..., :plain], kv[..., :plain])
        scores = scores + torch.einsum("thd,sd->hts", turn_neighbours(q[..., plain:], positions, theta), ropes)
        is_later = torch.arange(len(latents)) > positions[:, None]
        weights = (scores * (plain + rope) ** -0.5).masked_fill(is_later, -math.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", weights, kv[..., plain:]).reshape(len(x), -1)
        return F.linear(out, self[f"{at}.dense.weight"])


def alibi(num_heads: int) -> list[float]:
    """Slopes of heads (arXiv 2108.12409): a geometric sequence; of a number that is no power of two, those of the
    power below and every second one of the power above."""
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return first + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


def angles(positions: Tensor, size: int, theta: float, dtype: torch.dtype) -> Tensor:
    """[T, size / 2]."""
    return positions[:, None].to(dtype) * theta ** (-torch.arange(0, size, 2, dtype=dtype) / size)


def turn_halves(x: Tensor, positions: Tensor, size: int, theta: float) -> Tensor:
    """Turn the first `size` features of [T, H, D]; feature i goes with i + size / 2."""
    angle = angles(positions, size, theta, x.dtype)[:, None]
    one, two, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin(), rest], -1)


def turn_neighbours(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn all features of [T, .., D]; feature 2i goes with 2i + 1. All first ones come out before all second ones."""
    angle = angles(positions, x.shape[-1], theta, x.dtype)
    angle = angle if x.dim() == 2 else angle[:, None]
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def mlp(x: Tensor, tensors: Mapping[str, Tensor], at: str, limit: float | None = None) -> Tensor:
    """[T, C] -> [T, C]; `limit` is of silu(gate) above, and of up on both sides."""
    gate, up = (F.linear(x, tensors[f"{at}.{name}_proj.weight"]) for name in ("gate", "up"))
    gate = gate * torch.sigmoid(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.linear(gate * up, tensors[f"{at}.down_proj.weight"])


def experts(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    at: str,
    config: Mapping[str, Any],
    limits: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """[T, C] -> [T, C]; `limits` are of routed experts and of the shared one."""
    scores = torch.sigmoid(F.linear(x, tensors[f"{at}.gate.weight"]))
    groups = (scores + tensors[f"{at}.gate.expert_bias"]).view(len(x), config["n_group"], -1)
    best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    kept = groups.masked_fill(~is_kept[..., None], -math.inf).flatten(1)
    chosen = kept.topk(config["num_experts_per_tok"], -1).indices
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
    out = mlp(x, tensors, f"{at}.shared_experts", limits[1])
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            out[token] += weight * mlp(row[None], tensors, f"{at}.experts.{expert}", limits[0])[0]
    return out
