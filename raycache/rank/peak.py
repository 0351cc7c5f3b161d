"""Measures the peak activation memory of a step by running the largest steps on the loaded model.

The steps are synthetic: all their pages are one and the same, so that even the longest prefix needs no memory. The
results are meaningless, but memory use equals that of real steps of the same shape. Two shapes are run, since either
can need more: a prefill with the maximum number of new and scored tokens after the longest prefix, and a full decode
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_use import MemoryUse, free_bytes, refusing_out_of_memory
from raycache.memory.component import FULL, Reuse
from raycache.rank.pieces import LONGEST
from raycache.rank.rank import Rank
from raycache.rank.short_steps import MOST_TOKENS
from raycache.types import MAX_TOP_LOGPROBS, SamplingParams
from raycache.wire.plan import MAX_SCORED_TOKENS, Admit, Row, StepPlan

_GRAPH_BYTES = 32 << 20
"""Bytes per CUDA graph besides the memory that graphs share: driver structures and the attention plan (measured)."""
_PIECE_BYTES = 1 << 20
"""Bytes per piece of a step that is recorded, besides the memory that pieces share (0.9 MiB on an H200)."""
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0)


@dataclass(frozen=True)
class Largest:
    """Limits of a service's steps, and the largest steps within them.

    Attributes:
        tokens: per step.
        rows: per step.
        drafts: draft tokens per row.
        longest: tokens per sequence.
        page_size: tokens per page.
        spaces: component spaces of pages.
    """

    tokens: int
    rows: int
    drafts: int
    longest: int
    page_size: int
    vocab_size: int
    spaces: tuple[str, ...]

    @classmethod
    def of(cls, deployment: Deployment) -> Largest:
        """Read the limits from the settings."""
        config, longest = deployment.config, deployment.max_model_len
        if config.num_pages != "auto":
            longest = min(longest, config.num_pages * config.page_size)
        return cls(
            tokens=deployment.max_step_tokens,
            rows=config.max_running,
            drafts=config.most_drafts,
            longest=longest,
            page_size=config.page_size,
            vocab_size=deployment.model.vocab_size,
            spaces=tuple(
                dict.fromkeys((FULL, *(p.space for p in deployment.components if p.reuse is not Reuse.STATE_HERE)))
            ),
        )

    def prefill(self) -> StepPlan:
        """Chunks that end at the maximum sequence length, with the maximum number of scored tokens."""
        rows: list[Row] = []
        left, scores_left = self.tokens, MAX_SCORED_TOKENS + self.rows
        while left and len(rows) < self.rows:
            count = min(left, self.longest)
            start = self.longest - count
            ids = (np.arange(count, dtype=np.int32) % self.vocab_size).tobytes()
            targets = ids[4:][: 4 * scores_left]
            rows.append(self._row(len(rows), start, ids, targets=targets))
            left, scores_left = left - count, scores_left - len(targets) // 4
        return self._plan(rows)

    def decode(self) -> StepPlan:
        """A full batch of sampled decode rows, plus one row per possible draft token, as CUDA graphs run them."""
        last, most = np.zeros(1, np.int32).tobytes(), self.rows * (1 + self.drafts)
        return self._plan([self._row(slot, self.longest - 1, last) for slot in range(min(most, self.tokens))])

    def short(self) -> StepPlan:
        """As many new tokens as are recorded in pieces."""
        count = min(self.tokens, self.longest, LONGEST)
        return self._plan([self._row(0, self.longest - count, bytes(4 * count))])

    def scored(self) -> StepPlan:
        """As many new tokens as are recorded as a whole, all of which are emitted."""
        count = min(self.tokens, self.longest, MOST_TOKENS)
        return self._plan([self._row(0, self.longest - count, bytes(4 * count), targets=bytes(4 * (count - 1)))])

    def _row(self, slot: int, start: int, tokens: bytes, *, targets: bytes = b"") -> Row:
        read = 0 if start else -1
        return Row(
            slot, start, tokens, output_position=0, targets=targets, read_state=read, write_state=0, is_masked=True
        )

    def _plan(self, rows: list[Row]) -> StepPlan:
        pages = {space: [0] * -(-self.longest // self.page_size) for space in self.spaces}
        admits = [Admit(row.slot, pages, _SAMPLING, seed=0) for row in rows]
        mask_len = 4 * -(-self.vocab_size // 32)
        return StepPlan(1, rows=rows, admits=admits, num_top=MAX_TOP_LOGPROBS, mask_len=mask_len)


def run_largest(deployment: Deployment, rank: Rank, *, use: MemoryUse) -> None:
    """Run the largest steps. Collective over all ranks of a gang.

    Triggers compilation and allocation at first use, which is accounted as "kernels".

    Args:
        rank: on a GPU, with a temporary pool of one page and one slot.
        use: memory use of the GPU.
    Raises:
        ConfigError: the largest step does not fit beside the weights.
    """
    for part in deployment.components:
        for rows in rank.pool.rows(part.name).values():
            rows.view(torch.uint8).zero_()  # uninitialised memory may hold NaNs, which change the course of a step
    largest = Largest.of(deployment)
    for kind, plan in (("prefill", largest.prefill()), ("decode", largest.decode())):
        num_tokens = sum(row.num_tokens for row in plan.rows)
        doing = f"trying the largest {kind} step: {num_tokens} tokens of sequences of {largest.longest}"
        with refusing_out_of_memory(rank.ctx.device, doing=doing):
            rank.execute(plan, plan.masks_allowing_all())
    use.note("kernels")


def measure_peak(
    deployment: Deployment, rank: Rank, *, use: MemoryUse, num_graphs: int, num_short: int, num_pieces: int
) -> None:
    """Run the largest steps, and reserve the memory that they need. Collective over all ranks of a gang.

    Args:
        rank: which has run these steps before.
        use: memory use of the GPU; gets reservations for "activations" and "graphs".
        num_graphs: CUDA graphs of decode steps to be recorded. Those of the model share the memory of one step, those
            of the draft model that of another.
        num_short: graphs of whole short steps to be recorded, which share the memory of one step that emits all tokens.
        num_pieces: graphs of pieces to be recorded, which share the memory of one step.
    """
    largest = Largest.of(deployment)
    peaks = {kind: _peak(rank, plan) for kind, plan in (("prefill", largest.prefill()), ("decode", largest.decode()))}
    use.keep("activations", max(peaks.values()))
    shared = peaks["decode"] * (1 if rank.drafter is None else 2)
    graph_bytes = shared + num_graphs * _GRAPH_BYTES if num_graphs else 0
    if num_short:
        graph_bytes += _peak(rank, largest.scored()) + num_short * _GRAPH_BYTES
    if num_pieces:
        graph_bytes += _peak(rank, largest.short()) + num_pieces * _PIECE_BYTES
    use.keep("graphs", graph_bytes)


def _peak(rank: Rank, plan: StepPlan) -> int:
    """Bytes that torch reserves on the GPU for a step; an upper bound of its peak use."""
    device = rank.ctx.device
    free_bytes(device)  # also empties torch's cache of freed memory
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    rank.execute(plan, plan.masks_allowing_all())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before
