"""How often a draft draws its target's token, by how both draw: python -m benchmarks.draws models/smollm2

The target is the model, the draft a copy with noise in its weights; the text is drawn from the target.

    best        no way of drawing from both distributions agrees more often: the sum of the lesser probabilities
    race        this project's sampler: each token has a random time of its own, the same for both
    inverse     one random number for both, looked up in the sums of probabilities, likeliest token first
    apart       with random numbers of their own
    likeliest   the draft does not draw, and takes the likeliest token

Ends with what a draw takes, over that of a softmax and torch.multinomial, in turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.logits_process import TopPLogitsWarper

from raycache.rank.sampler import SampleRow, sample
from raycache.types import SamplingParams

_PROMPT = "Tell me about the history of bread, and how it is made."
_SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95))
_ROUNDS = 9
_SHAPES = ((1, 49_152), (8, 49_152), (32, 151_936))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draws", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="of each weight's deviation")
    parser.add_argument("--tokens", type=int, default=200, help="of the text (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=100, help="races per place (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    messages = [{"role": "user", "content": _PROMPT}]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    ids = target.generate(ids, max_new_tokens=options.tokens, do_sample=True, temperature=1.0, top_k=0)
    logits = target(ids).logits[0, -options.tokens :]
    print("noise  temperature  top_p    best   race  inverse  apart  likeliest")
    for noise in options.noise:
        others = _with_noise(target, noise)(ids).logits[0, -options.tokens :]
        for wanted in _SAMPLINGS:
            p, q = (_chances(scores, wanted) for scores in (logits, others))
            shares = (
                torch.minimum(p, q).sum(-1).mean(),
                _race(logits, others, wanted, num_seeds=options.seeds),
                _inverse(p, q),
                (p * q).sum(-1).mean(),
                p.gather(-1, q.argmax(-1, keepdim=True)).mean(),
            )
            text = "  ".join(f"{float(share):5.2f}" for share in shares)
            print(f"{noise:5.2f}  {wanted.temperature:11.1f}  {wanted.top_p:5.2f}   {text}", flush=True)
    for rows, vocab in _SHAPES:
        print(f"a draw of {rows} rows of {vocab}: {_pace(rows, vocab):.2f} times multinomial's")
    return 0


def _with_noise(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy whose matrices between embedding and head are off by so much."""
    other, source = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for weight in other.model.layers.parameters():
        if weight.ndim == 2:
            weight.add_(torch.randn(weight.shape, generator=source) * weight.std() * noise)
    return other


def _chances(logits: Tensor, wanted: SamplingParams) -> Tensor:
    scores = logits / wanted.temperature
    if wanted.top_p < 1:
        scores = TopPLogitsWarper(wanted.top_p)(torch.zeros(len(scores), 1, dtype=torch.int64), scores)
    return scores.double().softmax(-1)


def _race(logits: Tensor, others: Tensor, wanted: SamplingParams, *, num_seeds: int) -> float:
    """Share of draws in which the sampler gives both the same."""
    equal = 0
    for seed in range(num_seeds):
        rows = [SampleRow(wanted, seed=seed, position=place) for place in range(len(logits))]
        equal += int((sample(logits, rows) == sample(others, rows)).sum())
    return equal / (num_seeds * len(logits))


def _inverse(p: Tensor, q: Tensor) -> Tensor:
    """Share of numbers for which both find the same token: of each token's two intervals, what they share."""
    (p_begin, p_end), (q_begin, q_end) = _intervals(p), _intervals(q)
    return (torch.minimum(p_end, q_end) - torch.maximum(p_begin, q_begin)).clamp(min=0).sum(-1).mean()


def _intervals(chances: Tensor) -> tuple[Tensor, Tensor]:
    ordered, ids = chances.sort(descending=True, stable=True, dim=-1)
    end = torch.empty_like(chances).scatter_(-1, ids, ordered.cumsum(-1))
    return end - chances, end


def _pace(rows: int, vocab: int) -> float:
    """Time of a draw over that of softmax and multinomial, median of some rounds."""
    logits = torch.randn(rows, vocab) * 2.5

    def ours(turn: int) -> None:
        sample(logits, [SampleRow(SamplingParams(), seed=turn, position=row) for row in range(rows)])

    def theirs(turn: int) -> None:
        logits.softmax(-1).multinomial(1)

    def took_s(draw: Callable[[int], None], turn: int) -> float:
        begin = time.perf_counter()
        draw(turn)
        return time.perf_counter() - begin

    return statistics.median(took_s(ours, turn) / took_s(theirs, turn) for turn in range(_ROUNDS))


if __name__ == "__main__":
    raise SystemExit(main())
