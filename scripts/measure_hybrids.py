"""Measure a trained hybrid model of demos/hybrids/.

    python scripts/measure_hybrids.py demos/hybrids/kda_mla

Prints by document length how many answers are right as a whole, how many of their tokens, the margins between the first
and the second choice, and how many choices differ in bfloat16; then how many change when a part of the cache is lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hybrid_task import Task
from torch import Tensor
from train_hybrids import fast_kda
from transformers import AutoModelForCausalLM, PreTrainedModel

KINDS = {"attn_implementation": "eager", "experts_implementation": "eager"}


@torch.no_grad()
def measure(folder: Path) -> None:
    """Print all figures of a model directory."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **KINDS).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **KINDS).eval()
    print("document  answer  exact  tokens  margin min / 1 % / median  other tokens in bf16")
    for doc_len in (32, 64, 96, 128, 192, 256, 320, 384, 512, 768):
        _measure_answers(model, rounded, doc_len=doc_len)
    for doc_len in (96, 192):
        _measure_losses(model, doc_len=doc_len)


def _measure_answers(model: PreTrainedModel, rounded: PreTrainedModel, *, doc_len: int) -> None:
    """Print the line of a document length: 64 documents, answers of up to 64 tokens."""
    answer_len = min(64, doc_len - 8)
    task = Task(torch.device("cpu"), seed=doc_len)
    tokens, _ = task.batch(64, doc_len=doc_len, num_questions=1, answer_len=answer_len)
    logits = _answer_logits(model, tokens, answer_len=answer_len)
    said = logits.argmax(-1)
    right = said == tokens[:, -answer_len:]
    top = logits.topk(2).values
    margins = (top[..., 0] - top[..., 1]).flatten().sort().values
    low, typical = margins[len(margins) // 100], margins[len(margins) // 2]
    flips = _answer_logits(rounded, tokens, answer_len=answer_len).argmax(-1) != said
    print(
        f"{doc_len:8d}  {answer_len:6d}  {right.all(1).float().mean():5.0%}  {right.float().mean():6.2%}  "
        f"{margins[0]:10.2f} / {low:.2f} / {typical:.2f}{flips.float().mean():18.2%}",
        flush=True,
    )


def _answer_logits(model: PreTrainedModel, tokens: Tensor, *, answer_len: int) -> Tensor:
    """[B, answer_len, V]: what the model says where the answer stands, given the right tokens before."""
    with fast_kda():
        parts = [model(part[:, :-1], logits_to_keep=answer_len, use_cache=False).logits for part in tokens.split(8)]
    return torch.cat(parts)


def _measure_losses(model: PreTrainedModel, *, doc_len: int) -> None:
    """Print which share of greedy tokens changes when a part of the cache is zeroed between prompt and answer."""
    answer_len = 32
    tokens, _ = Task(torch.device("cpu"), seed=1).batch(16, doc_len=doc_len, num_questions=1, answer_len=answer_len)
    prompt = tokens[:, :-answer_len]
    whole = _continue(model, prompt, lost="", num_tokens=answer_len)
    for lost in ("recurrent", "conv", "kv"):
        changed = _continue(model, prompt, lost=lost, num_tokens=answer_len) != whole
        print(
            f"document {doc_len}, {lost} zeroed: {changed.float().mean():.0%} of the tokens change, "
            f"in {changed.any(1).float().mean():.0%} of the answers"
        )


def _continue(model: PreTrainedModel, prompt: Tensor, *, lost: str, num_tokens: int) -> Tensor:
    """Greedy tokens [B, num_tokens] after a prompt [B, T], whose cache loses one kind of part before the last token."""
    cache = model(prompt[:, :-1], use_cache=True).past_key_values
    for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
        if layer_type == "full_attention":
            parts = {"kv": [layer.keys, layer.values]}
        else:
            parts = {"recurrent": layer.recurrent_states.values(), "conv": layer.conv_states.values()}
        for part in parts.get(lost, ()):
            part.zero_()
    token, said = prompt[:, -1:], []
    for position in range(prompt.shape[1] - 1, prompt.shape[1] - 1 + num_tokens):
        place = torch.full_like(token, position)
        token = model(token, past_key_values=cache, position_ids=place, use_cache=True).logits.argmax(-1)
        said.append(token)
    return torch.cat(said, dim=1)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
