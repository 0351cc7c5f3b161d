"""SmolLM2 in float32: greedy tokens equal to transformers. The whole matrix is benchmarks/exactness.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exactness import Case, make_prompts, reference, run_split
from launch.demo.model import make_demo_model

pytestmark = [pytest.mark.real_model, pytest.mark.long]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("real") / "smollm2")


@pytest.fixture(scope="module")
def cases(model: Path) -> list[Case]:
    return reference(model, make_prompts(model, 4, longest=400), new_tokens=12)


@pytest.mark.parametrize(("tp", "pp", "cp"), [(1, 1, 1), (3, 1, 2)])
def test_greedy_tokens_equal_transformers_for_every_kind_of_hit(
    model: Path, cases: list[Case], tp: int, pp: int, cp: int
) -> None:
    outcomes = run_split(model, cases, tp=tp, pp=pp, cp=cp)
    assert [(one.kind, one.equal) for one in outcomes] == [(one.kind, one.total) for one in outcomes]
    from_cache = outcomes[1]
    assert from_cache.cached > 0.8 * sum(len(case.prompt) for case in cases)
