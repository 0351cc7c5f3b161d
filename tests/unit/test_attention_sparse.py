"""The indexer of every backend against sorting all tokens by score and position, as latent attention sees it.

Scores are small whole numbers, exact in every dtype, so that equal scores are common and a choice is right or wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionBackend, AttentionStep, LatentProjection
from raycache.attention.flashinfer_selected import _attend_slots
from raycache.attention.sparse import best_first_come, index_scores
from raycache.memory.component import FULL, index_keys, latent
from tests.oracle.attention import (
    DTYPES,
    MIXED,
    Batch,
    Case,
    Seat,
    close,
    dense,
    each_backend,
    each_device,
    each_dtype,
    skip_unless_declared,
)

ERROR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}
HEADS, DIM, RANK, ROPE, LAYERS = 2, 3, 8, 4, 2


class Sequences:
    """Random sequences of a case.

    Args:
        magnitude: of the index numbers; 0 makes all scores equal, 1 many of them.
    """

    def __init__(self, case: Case, *, magnitude: int) -> None:
        self.case = case

        def whole(*shape: int, salt: int) -> list[Tensor]:
            return [(x * magnitude).round().clamp(-magnitude, magnitude) for x in case.draw(*shape, salt=salt)]

        self.index_q, self.index_k, self.weights = whole(HEADS, DIM, salt=1), whole(DIM, salt=2), whole(HEADS, salt=3)
        self.q = case.draw(2, RANK + ROPE, salt=4)
        self.latent, self.rope = case.draw(RANK, salt=5), case.draw(ROPE, salt=6)

    def chosen(self, row: int, top_k: int) -> list[list[int]]:
        """Per query: positions by falling score, then rising position."""
        start, count = self.case.rows[row]
        found = []
        for i in range(start, start + count):
            products = self.index_k[row][: i + 1].double() @ self.index_q[row][i].double().T
            scores = (products.clamp(min=0) * self.weights[row][i].double()).sum(1).tolist()
            found.append(sorted(sorted(range(i + 1), key=lambda j: (-scores[j], j))[:top_k]))
        return found

    def right(self, row: int, top_k: int) -> Tensor:
        # Heads read the latents as they are: the projections are unit matrices.
        latents = self.latent[row][:, None].expand(-1, 2, -1)
        keys = torch.cat([latents, self.rope[row][:, None].expand(-1, 2, -1)], -1)
        return dense(self.case.new(self.q)[row], keys, latents, scale=0.3, allowed=self.chosen(row, top_k))

    def attend(self, backend: AttentionBackend, top_k: int) -> list[Tensor]:
        case, layers = self.case, range(LAYERS)
        components = [latent(layers, rank=RANK, rope_dim=ROPE, fmt=case.fmt), index_keys([0], dim=DIM, fmt=case.fmt)]
        unit = torch.eye(RANK, dtype=case.dtype).expand(2, -1, -1)

        def work(seat: Seat, step: AttentionStep) -> Tensor:
            index = seat.pool.index(0)
            index.key.fill_(float("nan"))
            seat.fill(index.write, self.index_k, space=FULL)
            index_q, index_k, weights, q, c, r = (
                seat.local(case.new(x))
                for x in (self.index_q, self.index_k, self.weights, self.q, self.latent, self.rope)
            )
            selection = step.select(index, index_q, index_k, weights, top_k=top_k)
            rows = index.key.flatten(0, 1)
            assert seat.holds_new(lambda slots: (rows[slots],), self.index_k, space=FULL)
            outs = []
            for layer in layers:
                view = seat.pool.latent(layer)
                for rows in view.pages:
                    rows.fill_(float("nan"))
                seat.fill(view.write, self.latent, self.rope, space=FULL)
                projection = LatentProjection(unit.to(q.device), unit.to(q.device))
                outs.append(step.attend_latent(view, q, c, r, projection, scale=0.3, selection=selection))
            assert torch.equal(outs[0], outs[1]), "one selection serves several layers"
            return outs[1]

        return Batch(case).run(backend, components, work)


def check(backend: AttentionBackend, case: Case, *, magnitude: int, top_k: int) -> None:
    sequences = Sequences(case, magnitude=magnitude)
    for row, out in enumerate(sequences.attend(backend, top_k)):
        close(out, sequences.right(row, top_k), ERROR[case.dtype])


@each_backend
@given(
    st.lists(st.tuples(st.just(0) | st.integers(0, 40), st.just(1) | st.integers(1, 20)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**20),
    st.integers(0, 4),
    st.integers(1, 40),
)
def test_any_batch_selects_as_sorting_does(
    backend: AttentionBackend,
    rows: list[tuple[int, int]],
    cp: int,
    share: int,
    dtype: torch.dtype,
    seed: int,
    magnitude: int,
    top_k: int,
) -> None:
    case = Case(rows, cp=cp, share=share, dtype=dtype, seed=seed)
    check(backend, case, magnitude=magnitude, top_k=top_k)


@each_backend
@pytest.mark.parametrize("cp", [1, 2, 4])
@each_dtype
@each_device
def test_selection_in_every_dtype(backend: AttentionBackend, device: str, dtype: str, cp: int) -> None:
    skip_unless_declared(backend, dtype, device)
    check(backend, Case(MIXED, cp=cp, dtype=DTYPES[dtype], device=device), magnitude=2, top_k=6)


@each_backend
@pytest.mark.parametrize("cp", [1, 2])
def test_scores_of_many_queries_and_long_prefixes_are_taken_in_blocks(
    backend: AttentionBackend, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycache.attention.sparse.MAX_SCORES", 100)
    check(backend, Case([(300, 40), (150, 1)], cp=cp, share=16), magnitude=2, top_k=64)


@given(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0, float("-inf")]), min_size=1, max_size=12), st.data())
def test_negative_zero_equals_zero(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    (found,) = best_first_come(torch.tensor([scores]), count).tolist()
    assert found == sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def test_a_score_that_is_no_number_is_chosen_last() -> None:
    q, k, weights = torch.ones(1, 1, 1), torch.tensor([[1.0], [float("nan")], [-1.0]]), torch.ones(1, 1)
    assert index_scores(q, k, weights).tolist() == [[1.0, float("-inf"), 0.0]]


def test_padding_of_chosen_slots_changes_nothing() -> None:
    """It stands for the first slot, which may hold anything."""
    rows = torch.randn(40, RANK + ROPE, dtype=torch.float64)
    rows[0] = torch.nan
    view: Any = SimpleNamespace(rank=RANK, rope_dim=ROPE, take=lambda slots, dtype: rows[slots].split([RANK, ROPE], 1))
    unit = torch.eye(RANK, dtype=torch.float64).expand(2, -1, -1)
    q, slots = (
        torch.randn(3, 2, RANK + ROPE, dtype=torch.float64),
        torch.tensor([[3, 4, -1], [5, -1, -1], [-1, -1, -1]]),
    )
    lengths = torch.tensor([2, 1, 0])
    out, lse = _attend_slots(view, q, LatentProjection(unit, unit), slots, lengths, scale=0.3)
    for i, length in enumerate(lengths.tolist()):
        keys = rows[slots[i, :length]]
        scores = 0.3 * q[i] @ keys.T
        torch.testing.assert_close(lse[i], scores.logsumexp(-1))
        torch.testing.assert_close(out[i], scores.softmax(-1) @ keys[:, :RANK] if length else torch.zeros_like(out[i]))
