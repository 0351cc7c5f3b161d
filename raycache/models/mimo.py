"""MiMo 7B: Qwen2 with prediction layers ("MiMo", arXiv 2505.07608)."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.self_attention import load_attention
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, Llama
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.models.qwen2 import read_qwen2

DRAFT_TENSORS = r"^model\.mtp_layers\."


class MiMo(Llama):
    """The layers of Llama, and the first prediction layer."""

    model_type = "mimo"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Biases are the same as in Qwen2."""
        file.require("attention_bias", True)
        file.require("use_mrope", False)
        num_drafts = file.count("num_nextn_predict_layers", 0)
        return replace(read_qwen2(file), num_drafts=num_drafts, ignored_tensors=(DRAFT_TENSORS,))

    def prediction_layer(self, config: DenseConfig) -> DenseConfig:
        """It has no sliding window."""
        name, attention = f"the prediction layer of {config.name}", replace(config.attention, window=0, windowed=())
        return replace(config, name=name, num_layers=1, attention=attention)

    def load_prediction_layer(self, config: DenseConfig, weights: ShardedWeights, target: Decoder) -> PredictionLayer:
        at, size, eps = "model.mtp_layers.0", config.hidden_size, config.rms_norm_eps
        own, rotary = weights.under(at), config.attention.rotary(weights.ctx.device)
        attention = load_attention(config.attention, own.under("self_attn"), layer=0, size=size, eps=eps, rotary=rotary)
        mlp = load_feed_forward(own.under("mlp"), size=size, inner=config.intermediate_size)
        names = PredictionNames(
            f"{at}.final_layernorm",
            f"{at}.token_layernorm",
            f"{at}.hidden_layernorm",
            f"{at}.input_proj",
            is_hidden_first=True,
        )
        return load_prediction(config, weights, pre_norm_layer(config, own, attention, mlp), target, names=names)
