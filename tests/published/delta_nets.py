"""The layers of Qwen3-Next and Qwen3.5: gated delta nets, gated attention, and layers that draft."""

from __future__ import annotations

from collections.abc import Callable

from tests.published.tensors import Config, Tensors, gqa, norms, plain


def gated_hybrid(
    at: str, config: Config, *, feed_forward: Callable[[str], Tensors], is_packed: bool, num_drafts: int
) -> Tensors:
    """All layers.

    Args:
        at: what names begin with, such as "model.".
        config: of the text model.
        feed_forward: the tensors of a layer's feed-forward part whose names begin with the argument.
        is_packed: whether the delta nets have their projections in two matrices instead of four.
        num_drafts: layers that draft.
    """
    found: Tensors = {}
    size = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        here = f"{at}layers.{layer}."
        found |= norms(here, size) | feed_forward(f"{here}mlp.")
        if (layer + 1) % config["full_attention_interval"]:
            found |= _delta_net(f"{here}linear_attn.", config, is_packed=is_packed)
        else:
            found |= gqa(f"{here}self_attn.", config, has_qk_norm=True, gates=2)
    if num_drafts:
        here = "mtp.layers.0."
        found |= norms(here, size) | feed_forward(f"{here}mlp.")
        found |= gqa(f"{here}self_attn.", config, has_qk_norm=True, gates=2)
        found |= plain("mtp.", fc=(size, 2 * size))
        found |= norms("mtp.", size, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return found


def _delta_net(at: str, config: Config, *, is_packed: bool) -> Tensors:
    size, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values, dtype = heads * dim, "BF16" if is_packed else "F32"
    found = plain(at, conv1d=(2 * keys + values, 1, taps), out_proj=(size, values)) | plain(
        at, dtype=dtype, norm=(dim,)
    )
    found |= {f"{at}A_log": (dtype, (heads,)), f"{at}dt_bias": ("BF16", (heads,))}
    if is_packed:
        return found | plain(at, in_proj_qkvz=(2 * keys + 2 * values, size), in_proj_ba=(2 * heads, size))
    rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return found | plain(at, **{f"in_proj_{kind}": (count, size) for kind, count in rows.items()})
