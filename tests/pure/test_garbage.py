"""What the garbage collector leaves out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from raycache.garbage import freeze_startup_objects, importing


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_is_off_in_the_block_and_on_again_after_an_error() -> None:
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_what_was_imported_is_left_out_of_later_collections() -> None:
    gc.unfreeze()
    with importing():
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(made)


def test_what_a_process_has_when_it_has_started_is_left_out_too() -> None:
    gc.unfreeze()
    made = [[] for _ in range(1000)]
    freeze_startup_objects()
    assert gc.get_freeze_count() >= len(made)


def test_what_is_garbage_by_then_is_freed() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    gone = weakref.ref(Cycle())
    freeze_startup_objects()
    assert gone() is None
