"""Kimi K3, experts in MXFP4, its text model inside of one that sees."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, mla, mlp, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    },
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "pad_token_id": 0,
    "text_config": {
        "_name_or_path": "",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "add_cross_attention": False,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 2,
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": "modeling_kimi_linear.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
        },
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "bos_token_id": 1,
        "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None,
        "decoder_start_token_id": None,
        "diversity_penalty": 0.0,
        "do_sample": False,
        "dtype": "bfloat16",
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "eos_token_id": 2,
        "exponential_decay_length_penalty": None,
        "finetuning_task": None,
        "first_k_dense_replace": 1,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "hidden_act": "situ",
        "hidden_size": 64,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "kv_lora_rank": 32,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "latent_moe_use_norm": True,
        "length_penalty": 1.0,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_length": 20,
        "max_position_embeddings": 1048576,
        "min_length": 0,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "no_repeat_ngram_size": 0,
        "num_attention_heads": 4,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_expert_group": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_return_sequences": 1,
        "num_shared_experts": 2,
        "output_attentions": False,
        "output_hidden_states": False,
        "output_scores": False,
        "pad_token_id": 0,
        "prefix": None,
        "problem_type": None,
        "pruned_heads": {},
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "scale_dtype": "torch.uint8",
                        "strategy": "group",
                        "symmetric": True,
                        "type": "float",
                        "zp_dtype": None,
                    },
                }
            },
            "format": "mxfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "remove_invalid_values": False,
        "repetition_penalty": 1.0,
        "return_dict": True,
        "return_dict_in_generate": False,
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": 32,
        "routed_scaling_factor": 1.0,
        "sep_token_id": None,
        "suppress_tokens": None,
        "task_specific_params": None,
        "temperature": 1.0,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "tie_word_embeddings": False,
        "tokenizer_class": None,
        "top_k": 50,
        "top_p": 1.0,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torchscript": False,
        "transformers_version": "4.56.2",
        "typical_p": 1.0,
        "use_bfloat16": False,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 16,
        "vocab_size": 128,
    },
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "kimi_k3_vision", "vt_hidden_size": 32},
}


def tensors(config: Config) -> Tensors:
    text = config["text_config"]
    found, size = outside(text), text["hidden_size"]
    found |= plain("model.", output_attn_res_norm=(size,), output_attn_res_proj=(1, size))
    for layer in range(text["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size)
        for name in ("self_attention_res", "mlp_res"):
            found |= plain(at, **{f"{name}_norm": (size,), f"{name}_proj": (1, size)})
        if layer + 1 in text["linear_attn_config"]["full_attn_layers"]:
            inner = text["num_attention_heads"] * text["v_head_dim"]
            found |= mla(f"{at}self_attn.", text) | plain(f"{at}self_attn.", g_proj=(inner, size))
        else:
            found |= _kda(f"{at}self_attn.", text)
        if layer < text["first_k_dense_replace"]:
            found |= mlp(f"{at}mlp.", size, text["intermediate_size"])
        else:
            found |= _experts(f"{at}block_sparse_moe.", text)
    vision = {
        "vision_tower.patch_embed.proj.weight": ("BF16", (32, 3, 14, 14)),
        "mm_projector.proj.0.weight": ("BF16", (64, 32)),
    }
    return {f"language_model.{name}": tensor for name, tensor in found.items()} | vision


def _kda(at: str, text: Config) -> Tensors:
    net, size = text["linear_attn_config"], text["hidden_size"]
    heads, dim, taps = net["num_heads"], net["head_dim"], net["short_conv_kernel_size"]
    inner = heads * dim
    found = plain(at, b_proj=(heads, size), g_proj=(inner, size), o_proj=(size, inner))
    found |= plain(at, f_a_proj=(dim, size), f_b_proj=(inner, dim)) | plain(at, dtype="F32", o_norm=(dim,))
    for kind in "qkv":
        found |= plain(at, **{f"{kind}_proj": (inner, size)})
        found |= plain(at, dtype="F32", **{f"{kind}_conv1d": (inner, 1, taps)})
    return found | {f"{at}A_log": ("F32", (dim,)), f"{at}dt_bias": ("F32", (inner,))}


def _experts(at: str, text: Config) -> Tensors:
    size, inner, latent = text["hidden_size"], text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    experts = text["num_experts"]
    found = plain(at, gate=(experts, size)) | {f"{at}gate.e_score_correction_bias": ("F32", (experts,))}
    found |= plain(at, routed_expert_down_proj=(latent, size), routed_expert_up_proj=(size, latent))
    found |= plain(at, routed_expert_norm=(latent,))
    for expert in range(experts):
        for name, (rows, columns) in {"w1": (inner, latent), "w3": (inner, latent), "w2": (latent, inner)}.items():
            packed = f"{at}experts.{expert}.{name}.weight"
            found[f"{packed}_packed"] = "U8", (rows, columns // 2)
            found[f"{packed}_scale"] = "U8", (rows, columns // 32)
    return found | mlp(f"{at}shared_experts.", size, inner * text["num_shared_experts"])
