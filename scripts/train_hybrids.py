"""Train the two hybrid models of demos/hybrids/ from scratch, on the task of hybrid_task.py.

    python scripts/train_hybrids.py mamba2_gqa --longest 512      # 4 minutes on one GPU
    python scripts/train_hybrids.py kda_mla                       # 4 minutes on one GPU
    python scripts/train_hybrids.py kda_mla --device cpu --tokens 1536 --minutes 60

kda_mla is a small `kimi_linear` (Kimi delta attention and latent attention), mamba2_gqa a small `granitemoehybrid`
(Mamba2 and grouped-query attention), both with experts. scripts/measure_hybrids.py tells how good they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hybrid_task import BOS, CHAT_TEMPLATE, CUE_LEN, EOS, PAD, SPECIAL, VOCAB_SIZE, Task, make_tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.kimi_linear import modeling_kimi_linear

# Shapes in this file: B sequences, T tokens, H heads, D head size, C tokens per chunk.

SHORTEST = 24  # the longest document at first
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-5,
}


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of "kda_mla" or "mamba2_gqa"."""
    if name == "kda_mla":
        return KimiLinearConfig(
            **SIZES,
            num_key_value_heads=4,
            intermediate_size=256,
            moe_intermediate_size=64,
            n_shared_experts=1,
            routed_scaling_factor=1.5,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            linear_head_dim=32,
            linear_num_heads=4,
            linear_conv_kernel_dim=4,
        )
    return GraniteMoeHybridConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=64,
        shared_intermediate_size=128,
        attention_multiplier=32**-0.5,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
    )


def make_model(name: str, *, seed: int) -> PreTrainedModel:
    """An untrained model whose states forget slowly: half-lives of 2 to 70 tokens where dt or the gate is 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_of(name), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if parameter_name.endswith("A_log"):
                weight.copy_(torch.log(0.01 * 30 ** torch.rand(weight.shape)))
    return model


def chunk_kda(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, forgets: bool = False, **_: Any
) -> tuple[Tensor, None]:
    """Kimi delta attention from an empty state, with one triangular solve per chunk: many times faster to train.

    Within a chunk, with G the running sum of the log decays, the delta rule's updates u solve
    (I + A) u = beta (v - k e^G S), A[i, j] = beta_i <k_i e^(G_i - G_j), k_j> for j < i (see "Kimi Linear",
    arXiv 2510.26692, section 3).

    Args:
        query, key, value, g: [B, T, H, D]; g <= 0 is the log of the decay per channel.
        beta: [B, T, H].
        forgets: begin every chunk with an empty state.
    Returns:
        (outputs [B, T, H, D], no state).
    """
    num_tokens, size = query.shape[1], query.shape[-1]
    chunk_len = 16 if forgets else 32
    rows = (F.normalize(query, dim=-1) * size**-0.5, F.normalize(key, dim=-1), value, g, beta[..., None])
    padding = (0, 0, 0, 0, 0, -num_tokens % chunk_len)
    q, k, v, g, beta = (F.pad(x.float(), padding).transpose(1, 2).unflatten(2, (-1, chunk_len)) for x in rows)
    decay = g.cumsum(-2)
    pairs = (decay[..., :, None, :] - decay[..., None, :, :]).clamp(max=0).exp() * k[..., None, :, :]
    strict = torch.einsum("...id,...ijd->...ij", beta * k, pairs).tril(-1)
    scores = torch.einsum("...id,...ijd->...ij", q, pairs).tril()
    eye = torch.eye(chunk_len, device=q.device)
    known = torch.cat([beta * v, beta * k * decay.exp()], dim=-1)
    fresh, seen = torch.linalg.solve_triangular(eye + strict, known, upper=False, unitriangular=True).split(size, -1)
    if forgets:
        outputs = scores @ fresh
    else:
        k_left, left = k * (decay[..., -1:, :] - decay).exp(), decay[..., -1, :, None].exp()
        outputs = _scan(q * decay.exp(), k_left, left, scores=scores, fresh=fresh, seen=seen)
    return outputs.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2).to(value.dtype), None


def _scan(q: Tensor, k: Tensor, left: Tensor, *, scores: Tensor, fresh: Tensor, seen: Tensor) -> Tensor:
    """Carry the state [B, H, D, D] over the chunks: [B, H, T/C, C, D]."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        update = fresh[:, :, i] - seen[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ update)
        state = state * left[:, :, i] + k[:, :, i].transpose(-1, -2) @ update
    return torch.stack(outputs, 2)


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        longest: documents grow up to this length.
        forgets: Kimi delta attention forgets every 16 tokens.
        num_marks: per document, on average.
    """

    longest: int
    forgets: bool = False
    num_marks: float = 2.0


def stages_of(name: str, *, longest: int) -> list[Stage]:
    """The training of a model, up to documents of a length.

    Kimi delta attention alone learns to find short texts again, and then never lets latent attention learn it for
    longer ones. So once the model knows the task in the small, these layers forget until attention has learned to find.
    """
    if name == "mamba2_gqa":
        return [Stage(longest)]
    return [Stage(SHORTEST), Stage(longest, forgets=True, num_marks=0.0), Stage(longest)]


class Course:
    """Where the training stands: documents grow by a quarter, and stages follow each other, with success.

    Args:
        stages: in their order; the last one lasts.

    Attributes:
        stage: the present one.
        longest: document at present.
        right: share of the answers' tokens that are right in the longest documents, a running mean.
    """

    def __init__(self, stages: list[Stage]) -> None:
        self.stage, *self._later = stages
        self.longest, self.right = SHORTEST, 0.0

    def note(self, share: float, *, doc_len: int) -> None:
        """Count a step that got this share right."""
        if doc_len > 0.9 * self.longest:
            self.right = 0.8 * self.right + 0.2 * share
        if self.right < 0.95:
            return
        if self.longest < self.stage.longest:
            self.longest, self.right = min(self.longest * 5 // 4, self.stage.longest), 0.9
        elif self._later:
            self.stage, *self._later = self._later
            self.longest, self.right = SHORTEST, 0.0


def train(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """Teach a model the task for some minutes."""
    device = torch.device(options.device)
    model.to(device).train()
    task, lengths = Task(device, seed=options.seed), torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    course = Course(stages_of(options.name, longest=options.longest))
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1, (step + 1) / 100, 0.02 + (1 - done) / 0.4)
        doc_len, num_questions, answer_len = _shape(course.longest, lengths)
        size = max(4, options.tokens // (doc_len + num_questions * (answer_len + CUE_LEN + 2)))
        task.num_marks = course.stage.num_marks
        tokens, labels = task.batch(size, doc_len=doc_len, num_questions=num_questions, answer_len=answer_len)
        with fast_kda(forgets=course.stage.forgets):
            loss, share = _loss(model, tokens, labels)
            optimizer.zero_grad()
            loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
        step += 1
        course.note(share.item(), doc_len=doc_len)
        if step % 50 == 0:
            state = f"{course.stage}  longest {course.longest}  loss {loss.item():.4f}  right {course.right:.3f}"
            print(f"{time.monotonic() - start:5.0f} s  step {step}  {state}", flush=True)


@contextmanager
def fast_kda(*, forgets: bool = False) -> Iterator[None]:
    """Within it, transformers' Kimi layers compute with `chunk_kda`."""
    own = modeling_kimi_linear.chunk_kimi_delta_attention
    modeling_kimi_linear.chunk_kimi_delta_attention = partial(chunk_kda, forgets=forgets)
    try:
        yield
    finally:
        modeling_kimi_linear.chunk_kimi_delta_attention = own


def _shape(longest: int, generator: torch.Generator) -> tuple[int, int, int]:
    """Draw (document length, questions, answer length): half of the documents are the longest, the rest any length."""
    draw = torch.rand(4, generator=generator).tolist()
    doc_len = longest if draw[0] < 0.5 else int(16 + draw[1] * (longest - 15))
    num_questions = 1 + int(draw[2] * min(4, doc_len // 12))
    most = min(doc_len // num_questions - CUE_LEN, 64)
    return doc_len, num_questions, 4 + int(draw[3] * (most - 3))


def _loss(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and the share of tokens that are right, where the context determines the next token."""
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
    wanted = labels[:, 1:] >= 0
    scale = model.config.logits_scaling if model.config.model_type == "granitemoehybrid" else 1.0
    logits = model.lm_head(hidden[wanted]).float() / scale
    targets = labels[:, 1:][wanted]
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model directory: bfloat16 weights, configuration, and a tokenizer with one token per character."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{token.strip('</>')}_token": token for token in SPECIAL if token not in ("<s>", "</s>")},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train one model and write it."""
    parser = argparse.ArgumentParser(description="Train a model of demos/hybrids/.")
    parser.add_argument("name", choices=("kda_mla", "mamba2_gqa"))
    parser.add_argument("--out", type=Path, default=Path("demos/hybrids"), help="parent of the model's directory")
    parser.add_argument("--minutes", type=float, default=4.0, help="training time; the learning rate follows the clock")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768, help="per step")
    parser.add_argument("--longest", type=int, default=320, help="longest document, in characters")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = make_model(options.name, seed=options.seed)
    train(model, options)
    save(model, options.out / options.name)


if __name__ == "__main__":
    main()
