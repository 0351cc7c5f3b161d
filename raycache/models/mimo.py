"""MiMo 7B: Qwen2 with layers that predict the tokens after the next one ("MiMo", arXiv 2505.07608)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, pre_norm_layer
from raycache.models.dense import DenseConfig, load_attention
from raycache.models.feed_forward import load_feed_forward
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.models.qwen2 import Qwen2

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

DRAFT_TENSORS = r"^model\.mtp_layers\."


class MiMo(Qwen2):
    """See models.base.Family, and models.drafts.loading.PredictingFamily."""

    model_type = "mimo"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Biases are those of Qwen2."""
        file.require("attention_bias", True)
        file.require("use_mrope", False)
        num_drafts = file.count("num_nextn_predict_layers", 0)
        return replace(super().read_config(file), num_drafts=num_drafts, ignored_tensors=(DRAFT_TENSORS,))

    def prediction_layer(self, config: DenseConfig) -> DenseConfig:
        """It sees all tokens."""
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, window=0, windowed=())

    def load_prediction_layer(
        self, config: DenseConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        at, size = "model.mtp_layers.0", config.hidden_size
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)
        attention = load_attention(0, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
        block = load_feed_forward(f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size)
        return load_prediction(
            pre_norm_layer(at, attention, block, config, weights),
            PredictionNames(
                f"{at}.final_layernorm",
                f"{at}.token_layernorm",
                f"{at}.hidden_layernorm",
                f"{at}.input_proj",
                is_hidden_first=True,
            ),
            config,
            weights,
            ctx,
            target,
        )
