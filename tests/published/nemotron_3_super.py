"""Nemotron 3 Super: experts of fewer features than the model, a prediction part, a step limit that is infinite."""

from __future__ import annotations

from typing import Any

from tests.published import nemotron_3_nano
from tests.published.nemotron_3_nano import layer_of
from tests.published.tensors import Config, Tensors, plain

CONFIG: dict[str, Any] = {
    **{key: value for key, value in nemotron_3_nano.CONFIG.items() if key != "torch_dtype"},
    "dtype": "bfloat16",
    "moe_latent_size": 24,
    "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E",
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
    "time_step_limit": [0.0, float("inf")],
}


def tensors(config: Config) -> Tensors:
    size, found = config["hidden_size"], nemotron_3_nano.tensors(config)
    for layer, kind in enumerate(config["mtp_hybrid_override_pattern"]):
        found |= layer_of(kind, f"mtp.layers.{layer}.", config)
    found |= plain("mtp.layers.0.", enorm=(size,), hnorm=(size,), eh_proj=(size, 2 * size))
    return found | plain("mtp.layers.1.", final_layernorm=(size,))
