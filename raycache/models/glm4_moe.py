"""GLM-4.5 and 4.6: grouped-query attention with partial rotary embedding, grouped experts with a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.expert_config import ExpertConfig, read_grouped_experts, read_mlp_layers
from raycache.layers.expert_weights import load_grouped_moe
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.rope import Rotary
from raycache.layers.self_attention import HeadShape, load_attention, read_attention, read_rotary_share
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, read_dense
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction


@dataclass(frozen=True)
class Glm4MoeConfig(DenseConfig):
    """A decoder with experts in most layers.

    Attributes:
        mlp_layers: layers with an MLP instead of experts.
    """

    experts: ExpertConfig
    mlp_layers: tuple[int, ...]


class Glm4Moe:
    """Layers of attention and experts or an MLP, with a norm before each; a prediction layer."""

    model_type = "glm4_moe"

    def read_config(self, file: ConfigFile) -> Glm4MoeConfig:
        """By default, half of each head is rotated."""
        file.require("mlp_bias", False)
        require_full_attention(file)
        num_heads, num_kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads")
        heads = HeadShape(num_heads, num_kv_heads, file.integer("head_dim", file.integer("hidden_size") // num_heads))
        attention = read_attention(
            file,
            heads,
            has_qk_norm=file.flag("use_qk_norm", False),
            rotary_share=read_rotary_share(file, head_dim=heads.head_dim, default=0.5),
            theta=10000.0,
        )
        dense = read_dense(file, replace(attention, has_output_bias=False))
        # Published checkpoints have a prediction layer even if config.json does not mention it.
        num_drafts = file.count("num_nextn_predict_layers", 1)
        return Glm4MoeConfig(
            **{**vars(dense), "num_drafts": num_drafts},
            experts=read_grouped_experts(file, scale=1.0),
            mlp_layers=read_mlp_layers(file, num_first=1),
        )

    def load(self, config: Glm4MoeConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            return _load_layer(layer, config, own, rotary=rotary)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)

    def prediction_layer(self, config: Glm4MoeConfig) -> Glm4MoeConfig:
        return replace(config, name=f"the prediction layer of {config.name}", num_layers=1, mlp_layers=())

    def load_prediction_layer(self, config: Glm4MoeConfig, weights: ShardedWeights, target: Decoder) -> PredictionLayer:
        only, at = self.prediction_layer(config), f"model.layers.{config.num_layers}"
        rotary = config.attention.rotary(weights.ctx.device)
        parts = _load_layer(0, only, weights.under(at), rotary=rotary)
        return load_prediction(
            config, weights, parts, target, names=PredictionNames.inside(at, norm="shared_head.norm")
        )


def _load_layer(layer: int, config: Glm4MoeConfig, own: ShardedWeights, *, rotary: Rotary) -> Sequence[Mixer]:
    size, eps, mlp = config.hidden_size, config.rms_norm_eps, own.under("mlp")
    attention = load_attention(config.attention, own.under("self_attn"), layer=layer, size=size, eps=eps, rotary=rotary)
    block: Mixer
    if layer in config.mlp_layers:
        block = load_feed_forward(mlp, size=size, inner=config.intermediate_size)
    else:
        block = load_grouped_moe(config.experts, mlp, size=size)
    return pre_norm_layer(config, own, attention, block)
