"""Kimi K3's text model, slowly: token by token where it is recurrent, expert by expert, plane by plane.

transformers has no class for it. Written from the published description of the model and of its tensors; shares no code
with the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from tests.oracle.twin_cache import TwinCache

SETTINGS: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 515,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_act": "situ",
        "activation_situ_beta": 1.5,
        "activation_situ_linear_beta": 2.5,
        "attn_res_block_size": 2,
        "latent_moe_use_norm": True,
        "routed_expert_hidden_size": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_attn_config": {
            "full_attn_layers": [4, 5],
            "kda_layers": [1, 2, 3],
            "num_heads": 8,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

LATENT_EPS = 1e-6
"""Of the norms inside latent attention, which do not take the model's."""


def is_kimi_k3(model_dir: Path) -> bool:
    """Whether a checkpoint is one of those that transformers has no class for."""
    return bool(json.loads((model_dir / "config.json").read_text()).get("model_type") == "kimi_k3")


def make_kimi_k3(model_dir: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write config.json and random float32 weights, under published names but for experts, which are not quantised.

    Args:
        model_dir: made if needed.
        seed: of the weights.
        text: keys of text_config that differ from `SETTINGS`.
    Returns:
        `model_dir`.
    """
    config = {**SETTINGS, "text_config": {**SETTINGS["text_config"], **text}}
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"language_model.{name}": _draw(name, shape, generator)
        for name, shape in _shapes(config["text_config"]).items()
    }
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return 0.3 * noise
    if name.endswith("dt_bias"):  # log decay = -5 sigmoid(exp(A_log) (x + dt_bias)): half-lives of 3 to 70 tokens
        return -3.0 - 3.0 * torch.rand(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("res_proj.weight"):  # so that planes have different shares
        return noise * shape[1] ** -0.5
    if len(shape) == 1:
        return 1.0 + 0.1 * noise
    return noise if "embed" in name else noise * shape[-1] ** -0.5


def _shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, vocab = text["hidden_size"], text["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, size),
        "model.norm.weight": (size,),
        "lm_head.weight": (vocab, size),
        "model.output_attn_res_norm.weight": (size,),
        "model.output_attn_res_proj.weight": (1, size),
    }
    for layer in range(text["num_hidden_layers"]):
        parts = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
        for name in ("self_attention_res", "mlp_res"):
            parts |= {f"{name}_norm.weight": (size,), f"{name}_proj.weight": (1, size)}
        is_full = layer + 1 in text["linear_attn_config"]["full_attn_layers"]
        parts |= {f"self_attn.{name}": shape for name, shape in (_mla if is_full else _kda)(text).items()}
        is_dense = layer < text["first_k_dense_replace"]
        parts |= _mlp("mlp.", size, text["intermediate_size"]) if is_dense else _moe("block_sparse_moe.", text)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found


def _mlp(at: str, size: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}gate_proj.weight": (inner, size), f"{at}up_proj.weight": (inner, size)} | {
        f"{at}down_proj.weight": (size, inner)
    }


def _kda(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    net, size = text["linear_attn_config"], text["hidden_size"]
    heads, dim, taps = net["num_heads"], net["head_dim"], net["short_conv_kernel_size"]
    inner = heads * dim
    found: dict[str, tuple[int, ...]] = {f"{kind}_proj.weight": (inner, size) for kind in "qkvg"}
    found |= {f"{kind}_conv1d.weight": (inner, 1, taps) for kind in "qkv"}
    found |= {"f_a_proj.weight": (dim, size), "f_b_proj.weight": (inner, dim), "b_proj.weight": (heads, size)}
    found |= {"A_log": (dim,), "dt_bias": (inner,), "o_norm.weight": (dim,), "o_proj.weight": (size, inner)}
    return found


def _mla(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, heads, rank, query = (
        text[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = (text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "q_a_proj.weight": (query, size),
        "q_a_layernorm.weight": (query,),
        "q_b_proj.weight": (heads * (nope + rope), query),
        "kv_a_proj_with_mqa.weight": (rank + rope, size),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "g_proj.weight": (heads * value, size),
        "o_proj.weight": (size, heads * value),
    }


def _moe(at: str, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, inner, latent = text["hidden_size"], text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    experts = text["num_experts"]
    found: dict[str, tuple[int, ...]] = {
        f"{at}gate.weight": (experts, size),
        f"{at}gate.e_score_correction_bias": (experts,),
        f"{at}routed_expert_down_proj.weight": (latent, size),
        f"{at}routed_expert_norm.weight": (latent,),
        f"{at}routed_expert_up_proj.weight": (size, latent),
    }
    for expert in range(experts):
        found |= {f"{at}experts.{expert}.{name}.weight": (inner, latent) for name in ("w1", "w3")}
        found |= {f"{at}experts.{expert}.w2.weight": (latent, inner)}
    return found | _mlp(f"{at}shared_experts.", size, inner * text["num_shared_experts"])


# The model ----------------------------------------------------------------------------------------------------------


class KimiK3Twin:
    """A checkpoint as `make_kimi_k3` writes it.

    Args:
        model_dir: of it.
        dtype: that it is computed in.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float64) -> None:
        self.text = json.loads((model_dir / "config.json").read_text())["text_config"]
        self.config = PreTrainedConfig(**self.text)
        self.weights = {
            name.removeprefix("language_model."): tensor.to(dtype)
            for name, tensor in load_file(model_dir / "model.safetensors").items()
        }
        self.eps = self.text["rms_norm_eps"]

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T] -> [T, V], of a whole sequence."""
        positions = torch.arange(len(ids))[None]
        found: Tensor = self(torch.tensor([list(ids)]), position_ids=positions, use_cache=False).logits[0]
        return found

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor,
        use_cache: bool,
        past_key_values: TwinCache | None = None,
    ) -> SimpleNamespace:
        """[1, T] token ids at [1, T] positions -> logits [1, T, V] and past_key_values."""
        text, cache = self.text, past_key_values or TwinCache()
        prefix = self["model.embed_tokens"][ids[0]]
        finished: list[Tensor] = []
        for layer in range(text["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = self.norm(self.mix(f"{at}self_attention_res", [*finished, prefix]), f"{at}input_layernorm")
            is_full = layer + 1 in text["linear_attn_config"]["full_attn_layers"]
            out = (self.latent_attention if is_full else self.delta_attention)(layer, x, cache)
            if layer % text["attn_res_block_size"] == 0:
                finished.append(prefix)
                prefix = out
            else:
                prefix = prefix + out
            x = self.norm(self.mix(f"{at}mlp_res", [*finished, prefix]), f"{at}post_attention_layernorm")
            is_dense = layer < text["first_k_dense_replace"]
            prefix = prefix + (self.mlp(f"{at}mlp.", x) if is_dense else self.experts(f"{at}block_sparse_moe.", x))
        found = self.norm(self.mix("model.output_attn_res", [*finished, prefix]), "model.norm")
        return SimpleNamespace(logits=F.linear(found, self["lm_head"])[None], past_key_values=cache)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + (self.eps if eps is None else eps)).sqrt() * self[name]

    def mix(self, name: str, planes: list[Tensor]) -> Tensor:
        """Every token chooses among the planes by itself."""
        scores = [F.linear(self.norm(plane, f"{name}_norm"), self[f"{name}_proj"])[:, 0] for plane in planes]
        shares = torch.stack(scores).exp()
        shares = shares / shares.sum(0)
        return (shares[..., None] * torch.stack(planes)).sum(0)

    def delta_attention(self, layer: int, x: Tensor, cache: TwinCache) -> Tensor:
        at, net, length = f"model.layers.{layer}.self_attn.", self.text["linear_attn_config"], len(x)
        heads, dim, taps = net["num_heads"], net["head_dim"], net["short_conv_kernel_size"]
        inner = heads * dim
        new = torch.cat([F.linear(x, self[f"{at}{kind}_proj"]) for kind in "qkv"], -1)
        before = cache.kept.get((layer, "conv"), x.new_zeros(3 * inner, taps - 1))
        rows = torch.cat([before.T, new])
        cache.kept[layer, "conv"] = rows[-(taps - 1) :].T
        kernel = torch.cat([self[f"{at}{kind}_conv1d"][:, 0] for kind in "qkv"])
        summed = torch.stack([(rows[t : t + taps].T * kernel).sum(-1) for t in range(length)])
        query, key, value = (summed * summed.sigmoid()).view(length, 3, heads, dim).unbind(1)
        query, key = (row / (row.square().sum(-1, keepdim=True) + 1e-6).sqrt() for row in (query, key))
        beta = F.linear(x, self[f"{at}b_proj"]).sigmoid()
        raw = F.linear(F.linear(x, self[f"{at}f_a_proj"]), self[f"{at}f_b_proj"]) + self.weights[f"{at}dt_bias"]
        rate = self.weights[f"{at}A_log"][:heads].exp()[:, None]
        decay = (net["gate_lower_bound"] * (rate * raw.view(length, heads, dim)).sigmoid()).exp()
        state, outs = cache.kept.get((layer, "state"), x.new_zeros(heads, dim, dim)), []
        for t in range(length):
            state = state * decay[t, :, :, None]
            held = torch.einsum("hk,hkv->hv", key[t], state)
            state = state + torch.einsum("hk,hv->hkv", key[t], (value[t] - held) * beta[t, :, None])
            outs.append(torch.einsum("hk,hkv->hv", query[t] * dim**-0.5, state))
        cache.kept[layer, "state"] = state
        out = self.norm(torch.stack(outs), f"{at}o_norm")
        gate = F.linear(x, self[f"{at}g_proj"]).sigmoid().view(length, heads, dim)
        return F.linear((out * gate).flatten(1), self[f"{at}o_proj"])

    def latent_attention(self, layer: int, x: Tensor, cache: TwinCache) -> Tensor:
        at, text, length = f"model.layers.{layer}.self_attn.", self.text, len(x)
        heads, nope, rope, rank = (
            text[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        low = self.norm(F.linear(x, self[f"{at}q_a_proj"]), f"{at}q_a_layernorm", LATENT_EPS)
        query = F.linear(low, self[f"{at}q_b_proj"]).view(length, heads, nope + rope)
        latent, shared = F.linear(x, self[f"{at}kv_a_proj_with_mqa"]).split([rank, rope], dim=-1)
        new = {"latent": self.norm(latent, f"{at}kv_a_layernorm", LATENT_EPS), "rope": shared}
        for name, rows in new.items():
            before = cache.kept.get((layer, name))
            cache.kept[layer, name] = rows if before is None else torch.cat([before, rows])
        latent, shared = (cache.kept[layer, name] for name in new)
        both = F.linear(latent, self[f"{at}kv_b_proj"]).view(len(latent), heads, -1)
        key, value = both.split([nope, text["v_head_dim"]], dim=-1)
        key = torch.cat([key, shared[:, None].expand(-1, heads, -1)], dim=-1)
        scores = torch.einsum("thd,shd->hts", query, key) * (nope + rope) ** -0.5
        seen = torch.ones(length, len(latent), dtype=torch.bool).tril(len(latent) - length)
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", shares, value).flatten(1)
        return F.linear(out * F.linear(x, self[f"{at}g_proj"]).sigmoid(), self[f"{at}o_proj"])

    def active(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear = self.text["activation_situ_beta"], self.text["activation_situ_linear_beta"]
        return beta * (gate / beta).tanh() * gate.sigmoid() * linear * (up / linear).tanh()

    def mlp(self, at: str, x: Tensor) -> Tensor:
        inner = self.active(F.linear(x, self[f"{at}gate_proj"]), F.linear(x, self[f"{at}up_proj"]))
        return F.linear(inner, self[f"{at}down_proj"])

    def experts(self, at: str, x: Tensor) -> Tensor:
        scores = F.linear(x, self[f"{at}gate"]).sigmoid()
        chosen = (scores + self.weights[f"{at}gate.e_score_correction_bias"]).topk(self.text["num_experts_per_token"])
        latent = F.linear(x, self[f"{at}routed_expert_down_proj"])
        rows = []
        for t in range(len(x)):
            shares = scores[t, chosen.indices[t]]
            row = torch.zeros_like(latent[0])
            for expert, share in zip(chosen.indices[t].tolist(), shares / shares.sum(), strict=True):
                w1, w2, w3 = (self[f"{at}experts.{expert}.w{number}"] for number in (1, 2, 3))
                row = row + share * F.linear(self.active(F.linear(latent[t], w1), F.linear(latent[t], w3)), w2)
            rows.append(row)
        routed = self.norm(torch.stack(rows), f"{at}routed_expert_norm")
        return F.linear(routed, self[f"{at}routed_expert_up_proj"]) + self.mlp(f"{at}shared_experts.", x)
