"""Settings for all tests: one thread per process, no network, repeatable examples."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and inherited by the processes that tests start: tiny models are many times slower with more
# threads than free cores. A rank of a service sets its number of threads to that of the cores, and one thread burns a
# core while it waits for another; the limit holds all the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_THREAD_LIMIT", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# No deadline per example, shared machines stall for seconds; the same examples every time, so that a red run stays red.
# Three times as many with `make test-all`, and as many as one likes with HYPOTHESIS_PROFILE=explore.
calm = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("some", calm, max_examples=50)
settings.register_profile("many", calm, max_examples=150)
settings.register_profile("explore", calm, max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "some"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the state of services that tests start away from the user's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))
    monkeypatch.delenv("RAYCACHE_API_KEY", raising=False)
