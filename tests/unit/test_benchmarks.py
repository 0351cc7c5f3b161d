"""Benchmarks run by hand: that they still fit the code they measure."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from benchmarks import cp_prefill

NAMES = sorted(path.stem for path in Path("benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_shares_of_a_prefill_are_those_of_its_milliseconds() -> None:
    generator = random.Random(0)
    spans = {
        kind: [(float(begin), float(begin + generator.randint(1, 40))) for begin in generator.sample(range(900), 12)]
        for kind in ("NCCL", "attention", "other kernels")
    }
    busy, computing = (
        {us for kind in kinds for begin, end in spans[kind] for us in range(int(begin), int(end))}
        for kinds in (spans, ("attention", "other kernels"))
    )
    found = cp_prefill.shares(spans, wall_ms=1.0)
    assert found["NCCL alone"] == pytest.approx((len(busy) - len(computing)) / 1e3)
    assert found["idle"] == pytest.approx(1.0 - len(busy) / 1e3)
    assert found["attention"] == pytest.approx(sum(end - begin for begin, end in spans["attention"]) / 1e3)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop>", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("void at::native::index_copy_kernel_impl<at::native::OpaqueType<2>>", "other kernels"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert cp_prefill.kind_of(kernel) == kind
