"""Teacher-forced logits of a gang: plans go in, the logits that every cp rank emits come out, without a scheduler
between."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.deployment.stages import with_stages
from raycache.gang.processes import ProcessRanks, meet_here
from raycache.memory.component import FULL
from raycache.models.base import read_config
from raycache.rank.build import load
from raycache.rank.member import Invitation, join
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan, is_emitted, local_positions

PAGE_SIZE = 8
NUM_PAGES = 96


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def scripted_plans(sequences: Sequence[Sequence[int]], *, seed: int) -> list[StepPlan]:
    """Chunks of all sequences mixed with single tokens, on scattered pages; the last two begin behind a shared prefix.

    Sequence 3 shares 5 pages with sequence 0 and sequence 4 shares 2 with sequence 1: their first pages are those of
        the other, which
    are written in earlier steps.
    """
    pages = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    tables = [[pages.pop() for _ in range(-(-len(tokens) // PAGE_SIZE))] for tokens in sequences]
    tables[3][:5] = tables[0][:5]
    tables[4][:2] = tables[1][:2]
    cuts = [
        {0: (0, 37), 1: (0, 1), 2: (0, 50)},
        {0: (37, 64), 1: (1, 30), 2: (50, 51)},
        {0: (64, 65), 1: (30, 31), 2: (51, 52)},
        {0: (65, 66), 1: (31, 70), 2: (52, 53), 3: (40, 75), 4: (16, 17)},
        {3: (75, 76), 4: (17, 33)},
        {0: (66, len(sequences[0])), 3: (76, len(sequences[3])), 4: (33, len(sequences[4]))},
    ]
    plans, known = [], {slot: 0 for slot in range(len(sequences))}
    for step, cut in enumerate(cuts, start=1):
        rows, admits = [], []
        for slot, (start, stop) in cut.items():
            if known[slot] == 0:
                first = start // PAGE_SIZE
                admits.append(Admit(slot, {FULL: tables[slot][:first]}, SamplingParams(temperature=0), seed=0))
                known[slot] = first
            needed = -(-stop // PAGE_SIZE)
            tokens = sequences[slot]
            rows.append(
                Row(
                    slot=slot,
                    start=start,
                    tokens=packed(tokens[start:stop]),
                    new_pages={FULL: tables[slot][known[slot] : needed]},
                    # Every position is asked for; the last one has no next token, so it counts as sampled.
                    output_position=0,
                    targets=packed(tokens[start + 1 : stop]),
                )
            )
            known[slot] = max(needed, known[slot])
        plans.append(StepPlan(step, rows, admits, num_top=0))
    return plans


def forced_logits(
    model: Path, plans: list[StepPlan], *, tp: int, pp: int, cp: int, device: str = "cpu"
) -> dict[tuple[int, int], NDArray[np.float32]]:
    """Run plans on a gang of processes.

    Returns:
        (slot, position in the sequence) -> logits of the next token.
    """
    config = Config(
        model=str(model),
        tp=tp,
        pp=pp,
        cp=cp,
        device=device,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        rank_timeout_s=60,
    )
    config = with_stages(config, read_config(model))
    meeting, invitations = meet_here(config, device_type=device)
    ranks = ProcessRanks(_run_plans, invitations)
    executor, _ = meeting.join(lambda: None)
    found: dict[tuple[int, int], NDArray[np.float32]] = {}
    try:
        ranks.send([[plan.pack() for plan in plans]] * config.world_size)
        for of_rank in ranks.receive(600.0):
            for place, logits in of_rank:
                assert place not in found or np.array_equal(found[place], logits), "tp ranks differ"
                found[place] = logits
    finally:
        executor.close()
        meeting.board.unlink()
        ranks.end()
        ranks.join(None)
    return found


def _run_plans(connection: Connection, invitation: Invitation) -> None:
    torch.set_num_threads(1)
    member, config = join(invitation), invitation.config
    rank = load(Deployment(config, read_config(Path(config.model)), member.ctx.device.type), member).build(NUM_PAGES)
    found = []
    for plan in [StepPlan.unpack(packed_plan) for packed_plan in connection.recv()]:
        logits = rank.forward(plan)
        if logits is None:
            continue
        lines = iter(logits.cpu().numpy())
        mine = local_positions(plan, cp_rank=rank.ctx.cp.rank, cp_size=rank.ctx.cp.size)
        for row, positions in zip(plan.rows, mine, strict=True):
            for position in positions[is_emitted(row, positions)].tolist():
                found.append(((row.slot, row.start + position), next(lines)))
    connection.send(found)
    connection.poll(60)  # the parent ends this process; until then peers may still be receiving from it
