"""SGLang's prefix index in Rust, driven as its scheduler drives it, for comparison.

Needs torch and an unpacked wheel of sglang 0.5.23 (`pip download --no-deps sglang`, a zip file): only its extension
`mem_cache*.so` is loaded. The extension is called directly, without the Python that SGLang puts around it, so this is
the least that it costs.
"""

from __future__ import annotations

import importlib.util
import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_FULL = 0  # the component of ordinary attention


class PeerCache:
    """Slots of a token pool, the index, and prompts that are running.

    Args:
        extension: the loaded module.
        num_tokens: of the pool.
        page_size: tokens per page.
    """

    name = "SGLang 0.5.23, Rust"

    def __init__(self, extension: ModuleType, *, num_tokens: int, page_size: int) -> None:
        self._extension = extension
        self.page_size = page_size
        params = extension.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            slru_protected_threshold=2,
            tlru_tail_budget=0,
            tlru_float_config=None,
            page_size=page_size,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            swa_req_ring=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            mamba_cache_chunk_size=None,
            mamba_max_states_per_path=None,
        )
        self._index = extension.RustUnifiedTreeCoreBinding(params, [_FULL])
        self._free = torch.arange(num_tokens)
        self._num_free = num_tokens

    @staticmethod
    def pack(tokens: Any) -> array[int]:
        """The form in which it wants an int32 array of tokens."""
        return array("q", tokens.astype("int64").tobytes())

    def begin(self, tokens: array[int]) -> tuple[int, Any]:
        """Match and lock a prompt, and make room for the rest; returns the length of the hit and what is running."""
        # One token is always left to compute: it matches what lies before.
        key = tokens[: (len(tokens) - 1) // self.page_size * self.page_size]
        found = self._index.match_prefix(self._extension.MatchParamsBinding(key=key, extra_key=None, cache_salt=None))
        hit, node = found.device_prefix_len, found.last_device_node_id
        lock = self._index.inc_lock_ref(node, [])
        slots = (
            self._index.collect_full_device_indices(node, self._index.root_node_handle(None)) if hit else self._free[:0]
        )
        missing = len(tokens) // self.page_size * self.page_size - hit
        if missing > self._num_free:
            self._evict(missing - self._num_free)
        self._num_free -= missing
        return hit, (tokens, torch.cat([slots, self._free[self._num_free : self._num_free + missing]]), hit, lock)

    def finish(self, running: Any) -> None:
        """Keep a prompt and unlock it."""
        tokens, slots, hit, lock = running
        insert = self._index.begin_insert(
            self._extension.InsertParamsBinding(
                key=tokens[: len(slots)],
                value=slots,
                extra_key=None,
                cache_salt=None,
                session_id=None,
                mamba_value=None,
                prev_prefix_len=hit,
                swa_evicted_seqlen=0,
                swa_branching_seqlen=None,
                inserted_len=0,
                priority=0,
                track_adopted_ranges=False,
                rotation_base=None,
            )
        )
        while True:
            self._apply(insert.actions)
            if insert.result is not None:
                break
            insert = self._index.resume_insert()
        self._apply(self._index.end_insert())
        unlock = self._extension.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=lock.skipped_lock_components,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self._index.dec_lock_ref(lock.node_id, unlock, False)

    @property
    def num_cached(self) -> int:
        """Tokens that it caches."""
        return int(self._index.evictable_size() + self._index.protected_size())

    def num_bytes(self) -> int:
        """Not told: its memory is not Python's."""
        return 0

    def check(self) -> None:
        """Assert that no slot is lost, when nothing runs."""
        assert self.num_cached + self._num_free == len(self._free), "slots are lost"

    def _evict(self, num_tokens: int) -> None:
        tracker: dict[int, int] = {_FULL: 0}
        self._index.evict_device_start(_FULL, num_tokens)
        while True:
            step = self._index.evict_device_next_node(_FULL, tracker)
            self._freed(step, tracker)
            if step.node_id is not None:
                self._freed(self._index.evict_device_leaf(step.node_id), tracker)
            elif not step.made_progress:
                break
        self._index.evict_device_end(_FULL)

    def _freed(self, step: Any, tracker: dict[int, int]) -> None:
        for component, count in step.tracker.items():
            tracker[component] += count
        for tensors in step.new_device_frees.values():
            self._give_back(tensors)
        self._apply(step.cache_actions)

    def _apply(self, actions: list[tuple[Any, ...]]) -> None:
        for action in actions:
            assert action[0] in ("free_device_kv", "free_device_kv_full_only"), f"unexpected {action[0]}"
            self._give_back(action[1])

    def _give_back(self, tensors: list[torch.Tensor]) -> None:
        for slots in tensors:
            self._free[self._num_free : self._num_free + len(slots)] = slots
            self._num_free += len(slots)


def load_peer(wheel: Path) -> ModuleType:
    """The extension of an unpacked wheel.

    Raises:
        FileNotFoundError: there is none below that folder.
    """
    path = next(wheel.glob("**/rust_tree_core/mem_cache*.so"), None)
    if path is None:
        raise FileNotFoundError(f"no rust_tree_core/mem_cache*.so below {wheel}: unpack a wheel of sglang there")
    spec = importlib.util.spec_from_file_location("mem_cache", path)
    assert spec is not None and spec.loader is not None, "a path to a file always has a spec"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
