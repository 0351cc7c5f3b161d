"""Memory of a GPU by purpose, what is refused for it, and the made-up steps that it is measured with."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycache.attention.torch_ref import TorchBackend
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.deployment.memory_plan import pages_that_fit, pool_bytes
from raycache.deployment.memory_use import MemoryUse, refusing_out_of_memory
from raycache.errors import ConfigError
from raycache.host.directory import SHARED_MEMORY, new_name
from raycache.host.nodes import open_all
from raycache.host.service import HostService
from raycache.memory.device import DevicePool
from raycache.memory.mover import Mover
from raycache.models.base import load_model, read_config
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.rank.peak import Largest
from raycache.rank.rank import Rank
from raycache.wire.plan import MAX_SCORED_TOKENS
from raycache.wire.results import result_lens, result_width
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.gang import on_gang
from tests.oracle.tiny import make_tiny

GIB = 1 << 30
GPU = torch.device("cuda:0")


def used(*free: int) -> MemoryUse:
    """Of a GPU of 100 GiB with so many GiB free, at the beginning and after each note."""
    figures = iter(free)
    return MemoryUse(GPU, total=100 * GIB, measure=lambda: next(figures) * GIB)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(0, 40))
def test_every_byte_of_the_gpu_has_a_purpose(free: list[int], kept: int) -> None:
    use = used(*free)
    for number in range(len(free) - 1):
        use.note(f"part {number % 3}")
    use.keep("part 0", kept * GIB)
    row = use.as_row()
    assert row["part 0"] == use.taken.get("part 0", 0) + kept * GIB
    assert sum(row.values()) == 100 * GIB and use.left == row["free"] == (free[-1] - kept - 2) * GIB


def test_what_was_there_before_is_the_context_or_somebody_elses() -> None:
    half = GIB // 2
    alone = MemoryUse(GPU, total=100 * GIB, measure=lambda: 100 * GIB - half)
    assert (alone.taken["context"], alone.taken["others"]) == (half, 0) and "others" not in str(alone)
    crowded = used(20)
    assert crowded.taken["others"] == 80 * GIB and "others 80.0 GiB" in str(crowded) and "`nvidia-smi`" in str(crowded)


def test_a_rank_that_is_refused_at_the_end_lets_go_of_the_host_tier(tmp_path: Path) -> None:
    config = Config(model=str(make_tiny(tmp_path / "model")), num_pages=8, page_size=8, host_memory="16MiB")
    deployment, service = deploy(config, device_type="cpu"), HostService(SHARED_MEMORY / new_name())
    full = replace(alone(), use=MemoryUse(torch.device("cpu"), total=GIB, measure=lambda: 0))
    others = movers()  # of tests before, which wait for the garbage collector
    try:
        (opened,) = open_all([service], deployment, epoch=0)
        with pytest.raises(ConfigError, match="too little memory") as refused:
            load(deployment, full).build(8, opened.path)
    finally:
        service.close()
    (mover,) = (each for each in movers() if all(each is not other for other in others))
    with pytest.raises(RuntimeError, match="after shutdown"):
        mover._saver.submit(print)
    del refused  # until here it has kept the mover


def movers() -> list[Mover]:
    """Those that have not been collected."""
    return [each for each in gc.get_objects() if type(each) is Mover]


def test_what_a_step_takes_must_be_there_at_the_end() -> None:
    use = used(99, 10)
    use.note("pages")
    use.keep("activations", 9 * GIB)
    use.check()  # in half of the margin
    use.keep("activations", 10 * GIB)
    with pytest.raises(ConfigError, match=r"^2.0 GiB too little memory on cuda:0 .*pages 89.0 GiB.*--max-step-tokens"):
        use.check()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 3 GiB. Try"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_running_out_of_memory_is_a_refusal_and_other_errors_are_not(error: RuntimeError) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"cuda:0 while a step runs \(CUDA .*\); use a smaller --max-step-tokens"
        ) as said,
        refusing_out_of_memory(GPU, doing="a step runs"),
    ):
        raise error
    assert "\n" not in str(said.value)
    with pytest.raises(RuntimeError, match="^illegal"), refusing_out_of_memory(GPU, doing="a step runs"):
        raise RuntimeError("illegal memory access")


# --- pages


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def fitting(tiny: Path, use: MemoryUse, **settings: object) -> int:
    ctx = ParallelContext.single(torch.device("cpu"))
    return pages_that_fit(deployed(tiny, **settings), ctx=ctx, ranks_on_node=1, use=use)


def deployed(tiny: Path, **settings: object) -> Deployment:
    config = Config.from_mapping({"model": str(tiny), "max_running": 100_000, **settings})
    return Deployment(config, read_config(tiny), "cpu")


def test_pages_take_what_is_left_and_no_more(tiny: Path) -> None:
    use = used(99, 20)
    use.note("weights")
    use.keep("activations", 5 * GIB)
    ctx = ParallelContext.single(torch.device("cpu"))
    pages = fitting(tiny, use)
    sizes = [pool_bytes(deployed(tiny), num_pages=count, ctx=ctx) for count in (pages, pages + 1)]
    assert sizes[0] <= 13 * GIB < sizes[1]


def test_pages_of_an_earlier_start_are_not_refused_when_this_one_measures_a_little_less(tiny: Path) -> None:
    earlier, later = used(90), MemoryUse(GPU, total=100 * GIB, measure=lambda: 90 * GIB - GIB // 2)
    pages = fitting(tiny, earlier)
    assert fitting(tiny, later) < pages == fitting(tiny, later, num_pages=pages)


@pytest.mark.parametrize("wish", [{"kv_memory": "15GiB"}, {"num_pages": 10**6}])
def test_more_than_what_is_left_is_refused_with_what_is_there(tiny: Path, wish: dict[str, object]) -> None:
    use = used(99, 20)
    use.note("weights")
    use.keep("activations", 5 * GIB)
    (name,) = wish
    with pytest.raises(ConfigError, match=rf"^{name}=.* 13.0 GiB are left.*weights 79.0 GiB.*use a smaller {name}"):
        fitting(tiny, use, **wish)
    assert fitting(tiny, use, kv_memory="12GiB") and fitting(tiny, use, num_pages=100) == 100


def test_nothing_left_is_refused_with_what_is_there(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no page.*others 98.0 GiB.*use more ranks, a smaller max_step_tokens"):
        fitting(tiny, used(2))


# --- steps to measure with


@pytest.mark.parametrize("split", [Split(), Split(tp=2, cp=2)], ids=["whole", "split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_steps_run_with_a_pool_of_one_page(tmp_path: Path, family: str, split: Split) -> None:
    folder = make_family(tmp_path / family, family)
    model = read_config(folder)
    config = Config(model=str(folder), page_size=16, max_step_tokens=70, max_running=3, max_model_len=100)
    deployment = Deployment(config, model, "cpu")

    def run(ctx: ParallelContext) -> list[tuple[int, int]]:
        pool = DevicePool(
            deployment.components,
            num_layers=model.num_layers,
            sizes=dict.fromkeys(deployment.pool_sizes(1), 1),
            page_size=config.page_size,
            ctx=ctx,
        )
        loaded = load_model(model, Checkpoint(folder), ctx, dtype=torch.float32, on_progress=lambda done, total: None)
        rank = Rank(ctx=ctx, config=model, model=loaded, pool=pool, backend=TorchBackend(), dtype=torch.float32)
        largest = Largest.of(deployment)
        found = []
        for plan in (largest.prefill(), largest.decode()):
            answer = rank.execute(plan, plan.masks_allowing_all())
            assert answer.shape == (result_lens(plan, cp_size=split.cp)[ctx.cp.rank], result_width(plan))
            found.append((len(plan.rows), len(answer)))
        return found

    by_rank = on_gang(split, run)
    assert sum(answers for _, answers in (found[0] for found in by_rank[:: split.tp])) == 70
    assert all(rows == (1, 3) for rows in ((found[0][0], found[1][0]) for found in by_rank))


def test_a_step_that_is_longer_than_a_sequence_has_several() -> None:
    largest = Largest(tokens=250, rows=2, drafts=0, longest=100, page_size=16, vocab_size=50, spaces=("full",))
    plan = largest.prefill()
    assert [(row.start, row.num_tokens, row.num_targets) for row in plan.rows] == [(0, 100, 99), (0, 100, 99)]
    assert np.frombuffer(plan.rows[0].tokens, np.int32).max() == 49
    assert [len(admit.pages["full"]) for admit in plan.admits] == [7, 7]
    assert [row.start for row in largest.decode().rows] == [99, 99]


def test_no_more_tokens_are_scored_than_in_a_real_step() -> None:
    plan = Largest(tokens=3000, rows=5, drafts=0, longest=2000, page_size=16, vocab_size=50, spaces=("full",)).prefill()
    assert [row.num_tokens for row in plan.rows] == [2000, 1000]
    assert sum(row.num_targets for row in plan.rows) == MAX_SCORED_TOKENS + 5  # rows without room are scored one by one
