"""The layers of DeepSeek-V3 and of what descends from it: latent attention, maybe an indexer, grouped experts, and one
layer behind the others that predicts the token after the next one."""

from __future__ import annotations

from tests.published.tensors import Config, Tensors, mla, mlp, norms, outside, plain


def deepseek(config: Config) -> Tensors:
    """All tensors in bfloat16."""
    found, size = outside(config), config["hidden_size"]
    last = config["num_hidden_layers"]
    for layer in range(last + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size) | mla(f"{at}self_attn.", config) | feed_forward(layer, f"{at}mlp.", config)
        if "index_n_heads" in config:
            found |= _indexer(f"{at}self_attn.indexer.", config)
        if layer >= last:
            found |= prediction(at, config)
    return found


def prediction(at: str, config: Config) -> Tensors:
    """What a layer that predicts has besides those of a layer."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    found = plain(at, eh_proj=(size, 2 * size), enorm=(size,), hnorm=(size,), shared_head__norm=(size,))
    return found | plain(at, embed_tokens=(vocab, size), shared_head__head=(vocab, size))


def feed_forward(layer: int, at: str, config: Config) -> Tensors:
    """An MLP in the first layers, experts in the others."""
    size, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    if layer < config["first_k_dense_replace"]:
        return mlp(at, size, config["intermediate_size"])
    found = plain(at, gate=(experts, size)) | {f"{at}gate.e_score_correction_bias": ("F32", (experts,))}
    for expert in range(experts):
        found |= mlp(f"{at}experts.{expert}.", size, inner)
    return found | mlp(f"{at}shared_experts.", size, inner * config["n_shared_experts"])


def _indexer(at: str, config: Config) -> Tensors:
    size, heads, dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    found = plain(at, wq_b=(heads * dim, config["q_lora_rank"]), wk=(dim, size), weights_proj=(heads, size))
    return found | {f"{at}k_norm.{kind}": ("F32", (dim,)) for kind in ("weight", "bias")}
