"""Tiny models that draft for others, and slow twins of what they draft.

Nothing is trained. The head of a target knows a successor of every token, and what its layers add is for or against
it. Whoever has its embedding and head drafts that often, and wrongly where the context matters.

    small model       the target's weights and noise, fewer layers; or of another family, with its embedding and head
    prediction layer  behind the target's last: x = eh_proj [enorm(e), hnorm(h)], eh_proj about [1 | 0]
    EAGLE             x = fc [e, h], fc about [1 | 0], no norm before the layer and none behind it
    EAGLE-3           u = fc [three residual streams]; queries, keys and values of [norm(e), norm(u)]. A token finds
                      itself by its embedding and takes that over; the head knows some tokens of the vocabulary

Row i of the last three takes h after token i, and e of token i + 1. A twin computes all rows again for each draft, in
float64, with true h up to the last known token; behind that, what it found itself.
"""

# Shapes in this file: T tokens of one sequence, C hidden size, V vocabulary, D draft vocabulary.

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tests.oracle.families import KNOWN, make_family
from tests.oracle.golden import InFloat64
from tests.oracle.ring_2_5 import Ring25, is_ring

_OUTPUTS = ("o_proj", "out_proj", "down_proj", "attention.dense", "output_linear", "w2")
"""What a layer adds to the residual stream comes through these, whatever a family calls them."""

_SHARPER, _LOUDER = 3.0, 2.0
"""Gains of queries and of what attention adds in a layer that drafts, so that each of its rows counts."""


@dataclass(frozen=True)
class _Layout:
    """How a family's checkpoints hold a prediction layer.

    Attributes:
        at: what the names of its tensors begin with.
        layer: what those of its attention and feed-forward part begin with.
        embed_norm, hidden_norm, join, norm: the others, without ".weight".
        settings: keys of config.json that announce it.
        kinds: lists of config.json that go on by one in a model which has it as its last layer.
        norm_offset: what norms add to their weights.
        is_hidden_first: what the target found comes first in what is joined.
        drawn: keys of config.json with which a family of 4 layers is drawn, so that the layer is the one behind them.
    """

    at: str
    layer: str
    embed_norm: str
    hidden_norm: str
    join: str
    norm: str
    settings: Mapping[str, Any]
    kinds: Mapping[str, str]
    norm_offset: float = 0.0
    is_hidden_first: bool = False
    drawn: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 5})


_BEHIND_LAST = _Layout(
    at="model.layers.4.",
    layer="model.layers.4.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    join="eh_proj",
    norm="shared_head.norm",
    settings={"num_nextn_predict_layers": 1},
    kinds={"layer_types": "indexed_attention", "mlp_layer_types": "sparse", "indexer_types": "full"},
)
_BESIDE = _Layout(
    at="mtp.",
    layer="mtp.layers.0.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    join="fc",
    norm="norm",
    settings={"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    kinds={"layer_types": "full_attention"},
    norm_offset=1.0,
)
_BEHIND_LATENTS = replace(
    _BEHIND_LAST,
    norm="final_layernorm",
    kinds={},
    drawn={"num_nextn_predict_layers": 1},
)
_OF_MIMO = _Layout(
    at="model.mtp_layers.0.",
    layer="model.mtp_layers.0.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    join="input_proj",
    norm="final_layernorm",
    settings={"num_nextn_predict_layers": 1},
    kinds={"layer_types": "full_attention"},
    is_hidden_first=True,
)
_LAYOUTS = {
    "bailing_moe_v2_5": _BEHIND_LATENTS,
    "bailing_hybrid": replace(
        _BEHIND_LATENTS,
        kinds={"layer_types": "full_attention", "mlp_layer_types": "sparse"},
        drawn={"num_hidden_layers": 5},
    ),
    "deepseek_v3": _BEHIND_LAST,
    "deepseek_v32": _BEHIND_LAST,
    "glm4_moe": _BEHIND_LAST,
    "glm_moe_dsa": _BEHIND_LAST,
    "qwen3_next": _BESIDE,
    "qwen2": _OF_MIMO,
    "qwen3_5_moe_text": _BESIDE,
    "qwen3_5_text": _BESIDE,
}
"""By model_type, or by family where transformers has no class; of targets with 4 layers."""


class Twin(Protocol):
    """Drafts slowly."""

    def drafted(self, tokens: Sequence[int], count: int) -> list[int]:
        """What follows `tokens`, of which all but the last went through the target."""
        ...


# --- checkpoints ------------------------------------------------------------------------------------------------------


def make_target(
    model_dir: Path, name: str, *, share: float = 0.7, seed: int = 0, like: Path | None = None, **settings: Any
) -> Path:
    """A model of a family whose head knows a successor of every token; what its layers add is for or against it.

    Args:
        model_dir: made if needed.
        name: a key of `KNOWN`.
        share: of what the layers of a random model add.
        seed: of the weights.
        like: a model made by this, whose embedding and head to take.
        settings: keys of config.json that differ from the family's.
    """
    make_family(model_dir, name, seed=seed, **{**settings, "tie_word_embeddings": False})
    config, generator = _config(model_dir), torch.Generator().manual_seed(seed)
    if like is None:
        embedding = _normal((config["vocab_size"], config["hidden_size"]), generator)
        before = torch.randperm(len(embedding), generator=generator)
        head = (embedding[before] + _normal(embedding.shape, generator)) * embedding.shape[1] ** -0.5
    else:
        embedding, head = (_find(like, part) for part in ("embed", "lm_head"))
        embedding = embedding * _embedding_scale(_config(like))

    def change(tensor_name: str, tensor: Tensor) -> Tensor:
        if "embed" in tensor_name or "lm_head" in tensor_name:
            return head if "lm_head" in tensor_name else embedding / _embedding_scale(config)
        if name == "gemma3" and "layers" in tensor_name and "post_" in tensor_name:
            return share * (1 + tensor) - 1  # norms behind its attention and MLP, as 1 + weight
        return share * tensor if tensor_name.removesuffix(".weight").endswith(_OUTPUTS) else tensor

    tensors = load_file(model_dir / "model.safetensors")
    _write(model_dir, {key: change(key, tensor) for key, tensor in tensors.items()}, config)
    return model_dir


def make_smaller(
    model_dir: Path, target_dir: Path, *, noise: float, num_layers: int | None = None, seed: int = 0
) -> Path:
    """A model's weights and noise, a share of each matrix's own deviation.

    Args:
        model_dir: made if needed.
        target_dir: of the model.
        noise: that share.
        num_layers: the first ones of a model whose lists are not per layer; None for all of any model.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(tensor_name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1 or not tensor_name.endswith((".weight", "_proj")):  # such as decays, which are constants
            return tensor
        return tensor + noise * tensor.std() * _normal(tensor.shape, generator)

    tensors = load_file(target_dir / "model.safetensors")
    fewer = {} if num_layers is None else {"num_hidden_layers": num_layers}
    kept = [name for name in tensors if num_layers is None or _layer(name) < num_layers]
    _write(model_dir, {name: disturb(name, tensors[name]) for name in kept}, {**_config(target_dir), **fewer})
    return model_dir


def make_predicting(
    model_dir: Path,
    name: str,
    *,
    has_copies: bool = False,
    noise: float = 0.7,
    share: float = 0.5,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A model of 4 layers with a prediction layer.

    Args:
        model_dir: made if needed.
        name: a key of `KNOWN`.
        has_copies: whether the layer comes with copies of the embedding and the head.
        noise: of what joins its inputs.
        share: of what the layers of a random model add.
        seed: of the weights.
        settings: keys of config.json that differ from the family's, but for numbers and kinds of layers.
    """
    family = KNOWN[name]
    layout, usual = _LAYOUTS[name if family.tensors else family.model_type], family.settings
    wide: dict[str, Any] = {key: [*usual[key], kind] for key, kind in layout.kinds.items() if key in usual}
    make_target(model_dir, name, share=share, seed=seed, **settings, **layout.drawn, **wide)
    config, generator = _config(model_dir), torch.Generator().manual_seed(seed + 1)
    width = config["hidden_size"]
    tensors = {
        tensor_name.replace("model.layers.4.", layout.layer): _raised(tensor_name, tensor, layout=layout)
        for tensor_name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    for norm in (layout.embed_norm, layout.hidden_norm, layout.norm):
        tensors[f"{layout.at}{norm}.weight"] = _norm(width, generator) - layout.norm_offset
    join = _join(width, noise, generator)
    tensors[f"{layout.at}{layout.join}.weight"] = join.roll(width, 1) if layout.is_hidden_first else join
    if has_copies:
        tensors[f"{layout.at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layout.at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    narrow = {key: config[key][:4] for key in layout.kinds if isinstance(config.get(key), list)}
    _write(model_dir, tensors, {**config, **narrow, **layout.settings, "num_hidden_layers": 4})
    return model_dir


def _raised(name: str, tensor: Tensor, *, layout: _Layout) -> Tensor:
    """Of the fifth layer, attention's weights that are sharper and louder."""
    if not name.startswith("model.layers.4."):
        return tensor
    if name.endswith("q_norm.weight"):
        return _SHARPER * (layout.norm_offset + tensor) - layout.norm_offset
    return {"q_b_proj": _SHARPER, "o_proj": _LOUDER, "dense": _LOUDER}.get(name.split(".")[-2], 1.0) * tensor


def make_eagle(
    head_dir: Path,
    target_dir: Path,
    *,
    has_bias: bool,
    num_layers: int = 1,
    noise: float = 0.6,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """An EAGLE head for a model. Layers behind its first have a norm before their attention.

    Args:
        head_dir: made if needed.
        target_dir: of the model.
        has_bias: whether what joins its inputs has one.
        num_layers: of the head.
        noise: of what joins its inputs.
        seed: of the weights.
        settings: keys of config.json that differ from the usual ones.
    """
    config = _head_config(target_dir, num_hidden_layers=num_layers, **settings)
    generator = torch.Generator().manual_seed(seed)
    tensors, width = {}, config["hidden_size"]
    gains = {"q_proj": _SHARPER, "o_proj": _LOUDER / 2, "down_proj": 0.5}
    for layer in range(num_layers):
        for name, shape in _layer_shapes(config, width).items():
            gain = gains.get(name.split(".")[-2], 1.0) * shape[1] ** -0.5
            tensors[f"layers.{layer}.{name}"] = gain * _normal(shape, generator)
        for name in ("input_layernorm", "post_attention_layernorm")[layer == 0 :]:
            tensors[f"layers.{layer}.{name}.weight"] = _norm(width, generator)
    tensors["embed_tokens.weight"] = _find(target_dir, "embed")
    tensors["fc.weight"] = _join(width, noise, generator)
    if has_bias:
        tensors["fc.bias"] = 0.1 * _normal((width,), generator)
    _write(head_dir, tensors, {**config, "architectures": ["LlamaForCausalLMEagle"], "bias": has_bias})
    return head_dir


def make_eagle3(
    head_dir: Path,
    target_dir: Path,
    *,
    draft_vocab: int,
    has_embedding: bool,
    outputs: Sequence[int] | None = None,
    noise: float = 0.5,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """An EAGLE-3 head of one layer for a model.

    Args:
        head_dir: made if needed.
        target_dir: of the model, of at least 6 layers.
        draft_vocab: D, tokens that its head knows.
        has_embedding: whether it has a copy of the target's embedding.
        outputs: three layers of the target whose outputs it takes; None for the usual ones, of which config.json says
            nothing.
        noise: of its matrices.
        seed: of the weights.
        settings: keys of config.json that differ from the usual ones.
    """
    config = _head_config(target_dir, **{"num_key_value_heads": 4, **settings})
    generator = torch.Generator().manual_seed(seed)
    width, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {}
    # Queries and keys are about the embedding, large enough that a token finds itself. Values and outputs add it, and
    # take away some of the feature, which is mostly about the token before.
    about = {"q_proj": 1.8, "k_proj": 1.8, "v_proj": 1.0, "o_proj": 2.0}
    for name, shape in _layer_shapes(config, 2 * width).items():
        gain = about.get(name.split(".")[-2], 0.0)
        tensors[f"midlayer.{name}"] = gain * torch.eye(*shape) + noise * shape[1] ** -0.5 * _normal(shape, generator)
    tensors["midlayer.self_attn.v_proj.weight"][:, width:] -= 0.5 * torch.eye(width)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = _norm(width, generator)
    known = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    target = load_file(target_dir / "model.safetensors")
    tensors["fc.weight"] = (3 * width) ** -0.5 * _normal((width, 3 * width), generator)
    tensors["norm.weight"] = _norm(width, generator)
    tensors["lm_head.weight"] = target["lm_head.weight"][known]
    tensors["d2t"] = known - torch.arange(draft_vocab)
    tensors["t2d"] = torch.isin(torch.arange(vocab), known)
    if has_embedding:
        tensors["embed_tokens.weight"] = _find(target_dir, "embed")
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    if outputs is not None:
        own["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(outputs)}
    _write(head_dir, tensors, {**config, **own})
    return head_dir


def _head_config(target_dir: Path, **settings: Any) -> dict[str, Any]:
    """Of a head with shapes and positions of its own."""
    target = _config(target_dir)
    sizes = {key: target[key] for key in ("hidden_size", "vocab_size")}
    sizes["max_position_embeddings"] = target.get("max_position_embeddings", 4096)  # some know no end
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    own = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80}
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    config = LlamaConfig(**{**sizes, **ids, **own, "head_dim": 16, "rope_parameters": rope, **settings})
    return {**config.to_dict(), "torch_dtype": "float32"}


def _layer_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, int]]:
    """Matrices of a decoder layer whose attention takes `width` numbers of a token."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_queries, num_keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj.weight": (num_queries, width),
        "self_attn.k_proj.weight": (num_keys, width),
        "self_attn.v_proj.weight": (num_keys, width),
        "self_attn.o_proj.weight": (hidden, num_queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _find(model_dir: Path, part: str) -> Tensor:
    """The tensor with that in its name."""
    tensors = load_file(model_dir / "model.safetensors")
    found: Tensor = next(tensor for name, tensor in tensors.items() if part in name)
    return found


def _embedding_scale(config: Mapping[str, Any]) -> float:
    """By which a model multiplies what it looks up."""
    if config["model_type"] == "gemma3_text":
        return float(config["hidden_size"] ** 0.5)
    return float(config.get("embedding_multiplier", 1.0))


def _join(width: int, noise: float, generator: torch.Generator) -> Tensor:
    """About [1 | 0]: [C, 2C], the embedding first."""
    deviation: float = noise * (2 * width) ** -0.5
    return torch.eye(width, 2 * width) + deviation * _normal((width, 2 * width), generator)


def _norm(width: int, generator: torch.Generator) -> Tensor:
    return _normal((width,), generator) * 0.3 + 1


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(*shape, generator=generator)
    return noise


def _layer(tensor_name: str) -> int:
    """Number of a tensor's layer, -1 for none."""
    parts = tensor_name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return config


def _write(model_dir: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, model_dir / "model.safetensors", metadata={"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(config))


# --- twins ------------------------------------------------------------------------------------------------------------


class SmallerModel:
    """Goes on greedily, whatever the target computed."""

    def __init__(self, model_dir: Path) -> None:
        self._model = _load(model_dir)

    @torch.no_grad()
    def drafted(self, tokens: Sequence[int], count: int) -> list[int]:
        """See Twin."""
        text = list(tokens)
        with InFloat64():
            for _ in range(count):
                text.append(int(self._model(**_inputs(text), use_cache=False).logits[0, -1].argmax()))
        return text[len(tokens) :]


class Head(nn.Module):
    """What the three kinds share: rows of a feature and the next token.

    Args:
        target: whole.
    """

    body: Any
    """A model without embedding and head, of the layers that draft."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.target: Any = target

    @torch.no_grad()
    def drafted(self, tokens: Sequence[int], count: int, *, others: Mapping[int, int] | None = None) -> list[int]:
        """See Twin.

        Args:
            tokens: known.
            count: of draft tokens.
            others: row -> what it takes for the next token, where that is the one of another sequence.
        """
        nexts = [(others or {}).get(row, token) for row, token in enumerate(tokens[1:])]
        with InFloat64():
            features = self.features(tokens[:-1])
            for _ in range(count):
                found = self.run(self.embedded(nexts), features)[-1:]
                nexts.append(self.token(found[0]))
                features = torch.cat([features, found])
        return nexts[len(tokens) - 1 :]

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """[T] -> [T, C]: as they enter the target's first layer. Some models scale what their embedding gives."""
        scale: float = self.target.config.to_dict().get("embedding_multiplier", 1.0)
        rows: Tensor = self.target.get_input_embeddings()(torch.tensor(tokens))
        return scale * rows

    def features(self, tokens: Sequence[int]) -> Tensor:
        """[T] -> [T, C]: behind each token, after the target's last norm."""
        hidden: Tensor = self.target.base_model(**_inputs(tokens), use_cache=False).last_hidden_state
        return hidden[0]

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """[T, C] each, of the next tokens and behind the tokens -> [T, C] that stands for features of the next rows."""
        raise NotImplementedError

    def token(self, found: Tensor) -> int:
        """[C] -> the likeliest."""
        return int(self.target.get_output_embeddings()(found).argmax())


def prediction_twin(model_dir: Path) -> Head:
    """Of a checkpoint with a prediction layer."""
    return RingPredictionLayer(model_dir) if is_ring(model_dir) else PredictionLayer(model_dir)


class PredictionLayer(Head):
    """The layer that a checkpoint has beside the target, in a model of that layer alone."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(_load(model_dir))
        config = _config(model_dir)
        layout, number = _LAYOUTS[config["model_type"]], config["num_hidden_layers"]
        wide = {key: [*config[key], kind] for key, kind in layout.kinds.items() if isinstance(config.get(key), list)}
        names = {f"^{re.escape(layout.layer)}": f"model.layers.{number}."}
        self.body = _load(model_dir, names=names, **wide, num_hidden_layers=number + 1).base_model
        self.body.layers = self.body.layers[number:]
        self.body.config.update({"num_hidden_layers": 1, **{key: kinds[number:] for key, kinds in wide.items()}})
        tensors = _read(model_dir, layout.at)
        self.embed_norm, self.hidden_norm, self.body.norm = (
            _norm_like(self.body.norm, tensors[f"{name}.weight"])
            for name in (layout.embed_norm, layout.hidden_norm, layout.norm)
        )
        self.join = tensors[f"{layout.join}.weight"]
        self.is_hidden_first = layout.is_hidden_first

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """See Head."""
        both = [self.embed_norm(embedded), self.hidden_norm(features)]
        joined = torch.cat(both[::-1] if self.is_hidden_first else both, -1) @ self.join.T
        return _through(self.body, joined)


class RingPredictionLayer(Head):
    """The same of a checkpoint that transformers has no class for."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(_load(model_dir))

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """See Head."""
        found: Tensor = self.target.predict(embedded, features)
        return found


class Eagle(Head):
    """A layer without a norm before its attention, and the target's head without a norm before that."""

    def __init__(self, head_dir: Path, target_dir: Path) -> None:
        super().__init__(_load(target_dir))
        self.body = LlamaModel(_llama_config(head_dir)).double()
        self.body.norm = self.body.layers[0].input_layernorm = nn.Identity()
        for number, layer in enumerate(self.body.layers):
            layer.load_state_dict(_read(head_dir, f"layers.{number}."))
        join, width = _read(head_dir, "fc."), self.target.config.hidden_size
        self.join = nn.Linear(2 * width, width, bias="bias" in join).double()
        self.join.load_state_dict(join)

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """See Head."""
        joined: Tensor = self.join(torch.cat([embedded, features], -1))
        return _through(self.body, joined)


class Eagle3(Head):
    """A layer whose attention takes token and feature side by side, and a head of its own."""

    def __init__(self, head_dir: Path, target_dir: Path) -> None:
        super().__init__(_load(target_dir))
        config = _llama_config(head_dir)
        self.body = LlamaModel(config)
        self.body.layers[0] = _WideLayer(config)
        tensors = _read(head_dir, "")
        self.norm = _norm_like(self.body.norm, tensors["norm.weight"])
        self.body.norm = nn.Identity()
        self.body.double()
        self.body.layers[0].load_state_dict(_read(head_dir, "midlayer."))
        count, named = self.target.config.num_hidden_layers, _config(head_dir).get("eagle_config")
        self.entering = [2, count // 2, count - 3]
        if named is not None:  # by their outputs, each of which enters the next
            self.entering = [number + 1 for number in named["eagle_aux_hidden_state_layer_ids"]]
        self.join, self.head, self.offsets = (tensors[name] for name in ("fc.weight", "lm_head.weight", "d2t"))

    def features(self, tokens: Sequence[int]) -> Tensor:
        """[T] -> [T, C]: of the streams that enter three layers, low ones first."""
        outputs = self.target.base_model(**_inputs(tokens), use_cache=False, output_hidden_states=True)
        return torch.cat([outputs.hidden_states[number][0] for number in self.entering], -1) @ self.join.T

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """See Head."""
        return _through(self.body, torch.cat([embedded, features], -1))

    def token(self, found: Tensor) -> int:
        """See Head."""
        number = int((self.norm(found) @ self.head.T).argmax())
        return number + int(self.offsets[number])


class _WideLayer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """[1, T, 2C] -> [1, T, C]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        width = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, narrow.out_features, bias=False))

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:  # type: ignore[override]
        """Embeddings and features, side by side."""
        embedded, features = hidden_states.chunk(2, -1)
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)
        after_attention = features + self.self_attn(hidden_states=joined, **context)[0]
        found: Tensor = after_attention + self.mlp(self.post_attention_layernorm(after_attention))
        return found


def _load(model_dir: Path, *, names: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """In float64; experts run one by one, the grouped product of the CPU knows no float64.

    Args:
        model_dir: checkpoint.
        names: patterns of the names of tensors, and what to read instead.
        settings: keys of config.json that differ.
    """
    if is_ring(model_dir):
        return Ring25(model_dir, torch.float64)
    config = AutoConfig.from_pretrained(model_dir, **settings)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, dtype=torch.float32, attn_implementation="eager", key_mapping=names
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval().double()


def _llama_config(head_dir: Path) -> LlamaConfig:
    return LlamaConfig.from_pretrained(head_dir, attn_implementation="eager")


def _read(model_dir: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin so, without that, floats in float64."""
    tensors = load_file(model_dir / "model.safetensors").items()
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors if name.startswith(prefix)}
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _norm_like(norm: nn.Module, weight: Tensor) -> nn.Module:
    found = copy.deepcopy(norm)
    found.weight = nn.Parameter(weight)
    return found


def _inputs(tokens: Sequence[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([list(tokens)]), "position_ids": torch.arange(len(tokens))[None]}


def _through(body: PreTrainedModel, rows: Tensor) -> Tensor:
    """[T, ..] -> [T, C]; row i at position i."""
    positions = torch.arange(len(rows))[None]
    hidden: Tensor = body(inputs_embeds=rows[None], position_ids=positions, use_cache=False).last_hidden_state
    return hidden[0]
