"""Checks keys of config.json that a family did not read: they have no effect, are rejected, or cause a warning.

    read by the family                       accepted
    without effect on inference              accepted
    changes the model, at its neutral value  accepted
    changes the model, at another value      rejected
    anything else                            listed in a warning

Silently ignoring a key could mean running another model than the one that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raycache.errors import CheckpointError

PARTS = ("text_config", "language_config", "llm_config")
"""Sections with the keys of a text model."""

WITHOUT_EFFECT = frozenset(
    """
    _name_or_path architectures attn_implementation _attn_implementation auto_map dtype id2label is_encoder_decoder
    label2id model_type name_or_path task_specific_params tokenizer_class torch_dtype transformers_version
    unsloth_fixed unsloth_version return_dict output_attentions output_hidden_states output_router_logits
    cache_implementation use_cache use_bfloat16 gradient_checkpointing problem_type
    attention_dropout attn_pdrop dropout embd_pdrop embedding_dropout hidden_dropout output_dropout resid_pdrop
    aux_loss_alpha router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_aux init_method init_std
    initializer_range initializer_factor rescale_prenorm_residual
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id ignore_index is_decoder length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix pruned_heads
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss
    tie_encoder_decoder top_k top_p torchscript typical_p
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id
    ep_size moe_shared_expert_overlap num_logits_to_keep pretraining_tp tensor_parallel use_mamba_kernels
    kv_cache_dtype quantization_config compression_config
    chunk_size mamba_chunk_size
    mtp_loss_scaling_factor mtp_num_hidden_layers num_nextn_predict_layers
    vision_config audio_config image_token_id image_token_index video_token_id vision_start_token_id
    vision_end_token_id vision_token_id boi_token_index eoi_token_index mm_tokens_per_image spatial_merge_size
    audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id vision_soft_tokens_per_image
    image_placeholder media_placeholder_token_id use_unified_vision_chunk video_placeholder
    rope_parameters.mrope_interleaved rope_parameters.mrope_section
    rope_scaling.mrope_interleaved rope_scaling.mrope_section
    multimodal_projector_bias projector_hidden_act vision_feature_layer
    """.split()
)
"""Keys about training, other software and vision; text has only one axis of positions."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """
        alibi attention_bias attn_output_gate attn_use_bias mlp_bias moe_router_use_bias parallel_attn qkv_bias
        use_alibi use_attention_sinks use_bias use_gate use_parallel_residual use_qk_norm use_qkv_bias
        use_mrope use_sliding_window use_swa qk_layernorm attn_temperature_tuning use_sandwich_norm use_double_wide_mlp
        add_full_attention_sink_bias add_swa_attention_sink_bias use_rope_scaling residual_in_fp32 linear_silu
        apply_residual_connection_post_layernorm mlp_gated scale_embeddings mla_use_output_gate latent_moe_use_norm
        linear_attn_config.use_full_rank_gate
        """.split(),
        (False,),
    ),
    **dict.fromkeys(
        """
        attention_multiplier attention_in_multiplier attention_out_multiplier attention_value_scale
        embedding_multiplier key_multiplier lm_head_multiplier logit_scale logits_scaling residual_multiplier
        routed_scaling_factor partial_rotary_factor rotary_pct scale_depth scale_emb n_group topk_group
        num_expert_group moe_layer_freq decoder_sparse_step mlp_multipliers ssm_multipliers
        """.split(),
        (1,),
    ),
    **dict.fromkeys(
        """
        attention_chunk_size attn_res_block_size attn_logit_softcapping clip_qkv compress_ratios
        expert_swiglu_limit_list linear_attn_config.gate_lower_bound routed_expert_hidden_size
        final_logit_softcapping first_k_dense_replace hc_mult index_topk layer_types logit_softcapping
        mlp_only_layers moe_latent_size moe_layers_enum n_hash_layers n_shared_experts no_rope_layer_interval
        no_rope_layers num_kv_shared_layers num_shared_experts q_lora_rank
        query_pre_attn_scalar rope_parameters rope_scaling rotary_dim share_expert_swiglu_limit_list
        shared_expert_intermediate_size shared_intermediate_size sliding_window sliding_window_size
        rope_parameters.llama_4_scaling_beta rope_scaling.llama_4_scaling_beta
        swiglu_limit swiglu_limits zero_expert_num hidden_size_per_layer_input global_head_dim
        """.split(),
        (0, []),
    ),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "scoring_func": ("softmax",),
    "score_function": ("softmax",),
    "position_embedding_type": ("rope", "absolute"),
}
"""Keys that change what a model computes -> values without effect. Null never has an effect."""

OF_FAMILY: Mapping[str, frozenset[str]] = {
    family: frozenset(keys.split())
    for family, keys in {
        # Keys of the linear attention of an earlier architecture.
        "bailing_hybrid": """
            group_norm_size linear_silu max_window_layers mtp_use_kda qk_head_dim
            """,
        # All heads have keys of their own; which kernels compute linear attention.
        "bailing_moe_v2_5": "linear_backend max_window_layers num_key_value_heads qk_head_dim",
        # Heads of latent attention: the rotated part's size, and the sum of both parts.
        "deepseek_v3": "head_dim qk_head_dim",
        "deepseek_v32": "head_dim qk_head_dim",
        # A list of the layers' indexers makes their period needless; n_routed_experts counts experts.
        "glm_moe_dsa": """
            head_dim index_share_for_mtp_iteration index_skip_topk_offset index_topk_freq num_experts qk_head_dim
            """,
        "kimi_k2": "head_dim qk_head_dim",
        # How time steps were drawn before training.
        "falcon_h1": "mlp_expansion_factor time_step_floor time_step_max time_step_min time_step_rank",
        "gemma3_text": "_sliding_window_pattern",
        # Embeddings per layer, and experts, that the model does not have.
        "gemma4_text": "expert_intermediate_size moe_intermediate_size num_experts top_k_experts "
        "vocab_size_per_layer_input",
        # Other names of num_experts_per_tok, and of the context before it was extended, which rope_scaling repeats.
        "gpt_oss": "experts_per_token initial_context_length",
        # Attention without positions.
        "granitemoehybrid": "rope_parameters rope_theta",
        # Latent attention without positions; groups are said by num_expert_group.
        "kimi_k3_text": "head_dim qk_head_dim rope_parameters rope_theta use_grouped_topk",
        "kimi_linear": "head_dim qk_head_dim rope_parameters rope_theta use_grouped_topk",
        # Prediction layers that are not published. What other kinds of layers, and other programs, have.
        "minimax_m2": """
            layernorm_linear_attention_beta max_model_len mlp_intermediate_size mtp_transformer_layers shared_moe_mode
            swa_rope_theta use_mtp
            """,
        # Tokens that other programs compute at a time. How a shared expert would be weighed.
        **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), "block_size shared_moe_mode"),
        # Attention without positions. How time steps were drawn before training. Experts of models that have none.
        "nemotron_h": """
            expand mamba_ssm_cache_dtype mtp_hybrid_override_pattern mtp_layers_block_type
            partial_rotary_factor rope_parameters rope_theta time_step_floor time_step_max time_step_min time_step_rank
            moe_intermediate_size moe_shared_expert_intermediate_size n_group n_routed_experts n_shared_experts
            norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
            """,
        # The window is off; max_window_layers would say where it begins.
        "qwen3_moe": "max_window_layers",
        "smollm3": "max_window_layers",
        # The inner size of MLPs that no layer has.
        "qwen3_next": "intermediate_size",
    }.items()
}
"""model_type -> keys without effect in that family, or redundant ones."""


def unknown_keys(model_type: str, unread: Mapping[str, Any], *, path: object) -> tuple[str, ...]:
    """Return unknown keys among those that a family did not read, sorted.

    Args:
        unread: key -> value; of sections as "section.key".
        path: of config.json, for messages.
    Raises:
        CheckpointError: a key changes what the model computes, and is not supported.
    """
    known = WITHOUT_EFFECT | OF_FAMILY.get(model_type, frozenset())
    unknown = []
    for key, value in unread.items():
        name = _in_text_model(key)
        if any(part in known for part in _beginnings(name)):
            continue
        if name not in NEUTRAL:
            unknown.append(key)
        elif not any(value == neutral for neutral in NEUTRAL[name]):
            neutral = NEUTRAL[name][0]
            raise CheckpointError(
                f"{path} has {key}={_short(value)}, which changes what the model computes and is not supported for "
                f"model_type {model_type}; only {neutral!r} is"
            )
    return tuple(sorted(unknown))


def _in_text_model(key: str) -> str:
    first, _, rest = key.partition(".")
    return rest if rest and first in PARTS else key


def _beginnings(key: str) -> Iterator[str]:
    """ "a.b.c" -> "a", "a.b", "a.b.c"."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
