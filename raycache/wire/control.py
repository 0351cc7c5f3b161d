"""Transport between decider and ranks: plans are broadcast, results come back from the last stage.

A plan is framed as [length: 8 bytes | msgpack]. A frame of FRAME bytes holds the plans of nearly all decode steps,
so that one broadcast is enough; a longer plan is followed by a second broadcast with the rest, which all ranks expect
from the length. The masks of a plan's rows, if any, are a broadcast of their own behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.errors import RankLostError
from raycache.parallel.collectives import Group, Started
from raycache.parallel.sharding import Coords, Split
from raycache.wire.plan import NO_MASKS, Masks, StepPlan
from raycache.wire.results import result_lens, result_width

FRAME = 16 * 1024
_POLL_S = 0.00002
"""Poll interval of pending transfers, which leaves time for other threads."""
_DECIDER = 0


def broadcast_plan(plan: StepPlan, control: Group) -> Callable[[], None]:
    """Start sending a plan to all ranks (decider's side).

    Does not wait: a rank receives a plan once it has finished the previous one, and the last stage finishes only when
    its results are received. With several plans in flight, a decider that waited here would deadlock.

    Returns:
        A function to call once the plan's results have arrived; raises RankLostError if a rank cannot receive it.
    """
    packed = plan.pack()
    frame = np.zeros(FRAME, np.uint8)
    frame[:8] = np.frombuffer(np.int64(len(packed)).tobytes(), np.uint8)
    head = np.frombuffer(packed[: FRAME - 8], np.uint8)
    frame[8 : 8 + len(head)] = head
    sent = [control.ibroadcast(torch.from_numpy(frame), root=_DECIDER)]
    if len(packed) > FRAME - 8:
        rest = torch.frombuffer(bytearray(packed[FRAME - 8 :]), dtype=torch.uint8)
        sent.append(control.ibroadcast(rest, root=_DECIDER))

    def wait() -> None:
        for part in sent:
            part()

    return wait


def receive_plan(control: Group, *, meanwhile: Callable[[], bool] = lambda: False) -> StepPlan:
    """Wait for the next plan (a rank's side).

    Args:
        meanwhile: called repeatedly while no plan arrives, as long as it returns True.
    Raises:
        RankLostError: the decider is gone, or silent for longer than the group's deadline.
    """
    head = torch.empty(FRAME, dtype=torch.uint8)
    started = control.ibroadcast(head, root=_DECIDER)
    _wait(started, meanwhile)
    frame = head.numpy()
    length = int(frame[:8].view(np.int64)[0])
    packed = frame[8 : 8 + length].tobytes()
    if length > FRAME - 8:
        rest = torch.empty(length - (FRAME - 8), dtype=torch.uint8)
        # As above, since a rank that others wait for in `meanwhile` may have to pass this on to them.
        _wait(control.ibroadcast(rest, root=_DECIDER), meanwhile)
        packed += rest.numpy().tobytes()
    return StepPlan.unpack(packed)


def broadcast_masks(masks: Masks, control: Group) -> Callable[[], None]:
    """Start sending the masks of the last plan that was sent, [num_masks, mask_len], like `broadcast_plan`."""
    return control.ibroadcast(torch.from_numpy(masks), root=_DECIDER)


def receive_masks(plan: StepPlan, control: Group, *, meanwhile: Callable[[], bool]) -> Masks:
    """Wait for the masks of the last plan that was received, like `receive_plan`; [0, 0] if it has none."""
    if not plan.mask_len:
        return NO_MASKS
    masks = torch.empty((plan.first_masks[-1], plan.mask_len), dtype=torch.uint8)
    _wait(control.ibroadcast(masks, root=_DECIDER), meanwhile)
    return masks.numpy()


def _wait(transfer: Started, meanwhile: Callable[[], bool]) -> None:
    while not transfer.is_done() and meanwhile():
        time.sleep(_POLL_S)
    transfer()


def result_ranks(split: Split) -> list[int]:
    """World ranks that send results, by cp rank: tp rank 0 of the last stage."""
    return [split.rank(Coords(pp=split.pp - 1, cp=cp, tp=0)) for cp in range(split.cp)]


def send_result(plan: StepPlan, result: NDArray[np.int64], control: Group) -> None:
    """Send a cp rank's results to the decider.

    Args:
        plan: the executed plan; its number is sent first, so that even an empty result reports completion.
        result: [result_len, result_width].
    """
    control.send(torch.from_numpy(np.concatenate([[plan.step], result.reshape(-1)])), to=_DECIDER)


def receive_results(plan: StepPlan, control: Group, *, split: Split) -> list[NDArray[np.int64]]:
    """Wait for the results of a plan from all cp ranks.

    Raises:
        RankLostError: a rank is gone, late, or sends the result of another step.
    """
    ranks, width = result_ranks(split), result_width(plan)
    results = [np.empty(1 + count * width, np.int64) for count in result_lens(plan, cp_size=split.cp)]
    # All are started before the first is waited for: gloo's sender waits until its receiver is ready.
    started = [
        control.irecv(torch.from_numpy(result), source=rank + 1) for rank, result in zip(ranks, results, strict=True)
    ]
    for rank, result, wait in zip(ranks, results, started, strict=True):
        wait()
        if result[0] != plan.step:
            raise RankLostError(rank, str(split.coords(rank)), plan.step, f"it sent the result of step {result[0]}")
    return [result[1:].reshape(-1, width) for result in results]
