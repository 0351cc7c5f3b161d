"""Families with heads that fast kernels take, in bfloat16; and a script of steps that goes the ways of a service.

settings       those of oracle/families.py with heads of 64 and 128, latents of 512 + 64, an index head of 128; heads of
               glm_moe_dsa and of gemma4's full layers as published, which are larger
weights        drawn as there, then rounded: read as float32 they are the same numbers
sequences      0 is computed from nothing; 3, 4 and 5 go on behind its first 10 pages; 1 and 2 are others
steps          chunks of several rows, single tokens among them, decodes of one to six rows, rows that come and go
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan
from tests.oracle.families import make_family

PAGE_SIZE = 16
NUM_PAGES = 112
WINDOW = 40
SHARED = 160
"""Tokens of sequence 0 behind which the heirs go on: whole pages."""

LENGTHS = (450, 210, 130, 280, 210, 215)
HEIRS = (3, 4, 5)
STATES = 1 + 2 * len(LENGTHS)
"""Slots of recurrent states: the restore point, and two of each sequence."""

_EXPERT_SHARE, _SPARSE_SHARE = 0.1, 0.2
"""Of what routed experts, and attention to chosen tokens, usually add: a choice can hang on rounding, and all that
follows from it may not."""

_UNSCALED_SHARE = 0.05
"""Of norms of queries where scores are not divided by the root of the head size: trained norms do that."""

_GQA = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_NARROW_GQA = {**_GQA, "head_dim": 64, "num_attention_heads": 8, "sliding_window": WINDOW}
_MLA = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK = {**_MLA, "q_lora_rank": 128, "num_hidden_layers": 3}
_INDEXER = {"index_topk": 48, "index_head_dim": 128}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_GQA, "num_hidden_layers": 3},
    "gpt_oss": {**_NARROW_GQA, "intermediate_size": 64},
    "gemma3": {**_NARROW_GQA, "query_pre_attn_scalar": 64},
    "gemma4": {**_NARROW_GQA, "num_global_key_value_heads": 1, "global_head_dim": 512, "enable_moe_block": False},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "glm_moe_dsa": {**_MLA, **_INDEXER, "q_lora_rank": 128, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "kimi_linear": {**_MLA, "linear_head_dim": 128, "linear_num_heads": 4},
    "bailing_hybrid": {**_MLA, "head_dim": 64},
    "bailing_moe_v2_5": {**_MLA, "head_dim": 64},
    "minimax": _GQA,
    "qwen3_next": {
        **_GQA,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "nemotron_h": {**_GQA, "ssm_state_size": 128, "mamba_head_dim": 64},
    "granitemoehybrid": {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
    },
}
"""Family -> keys of config.json that differ from the tiny one's."""


def make_half(model_dir: Path, name: str, **settings: Any) -> Path:
    """Write a checkpoint in bfloat16.

    Args:
        model_dir: made if needed.
        name: a key of `SETTINGS`.
        settings: keys of config.json that differ from those.
    Returns:
        `model_dir`.
    """
    make_family(model_dir, name, **{**SETTINGS[name], **settings})
    has_indexer, is_unscaled = "index_topk" in SETTINGS[name], "global_head_dim" in SETTINGS[name]
    for file in model_dir.glob("*.safetensors"):
        weights = load_file(file)
        shares = {key: _share(key, has_indexer=has_indexer, is_unscaled=is_unscaled) for key in weights}
        save_file({key: (weight * shares[key]).bfloat16() for key, weight in weights.items()}, file, {"format": "pt"})
    if has_indexer:
        # Releases of transformers call such layers by different names; published checkpoints do not name them.
        config = json.loads((model_dir / "config.json").read_text())
        config.pop("layer_types", None)
        (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir


def _share(name: str, *, has_indexer: bool, is_unscaled: bool) -> float:
    is_expert = ("experts." in name or "block_sparse_moe." in name) and "shared" not in name
    if is_expert and (".down_proj" in name or ".w2." in name or ".output_linear" in name):
        return _EXPERT_SHARE
    if is_unscaled and name.endswith(".q_norm.weight"):
        return _UNSCALED_SHARE
    return _SPARSE_SHARE if has_indexer and name.endswith(".o_proj.weight") else 1.0


def draw_sequences(vocab_size: int, *, seed: int = 1) -> list[list[int]]:
    """Tokens of all sequences."""
    generator = np.random.default_rng(seed)
    found: list[list[int]] = [generator.integers(3, vocab_size, length).tolist() for length in LENGTHS]
    for heir in HEIRS:
        found[heir][:SHARED] = found[0][:SHARED]
    return found


Step = Sequence[tuple[int, int]]
"""Rows: sequence, and how many new tokens."""


def _decodes(*slots: int, count: int) -> list[Step]:
    return [[(slot, 1) for slot in slots]] * count


STEPS: Sequence[Step] = (
    [(0, SHARED), (1, 1), (2, 70)],  # ends at the restore point
    [(0, 112), (1, 39), (2, 1), (0, 80), (0, 68)],  # rows go on where others end
    [(1, 140), (3, 70), (4, 10), (0, 1), (2, 1)],
    *_decodes(2, 0, 4, 1, 3, count=3),
    *_decodes(0, 1, 2, 3, 4, 5, count=2),  # 5 begins with a single token
    [(5, 32), (0, 1), (5, 1), (3, 1)],
    *_decodes(5, 0, 3, count=6),
    *_decodes(5, count=9),
    [(1, 20), (4, 1)],
    *_decodes(4, 1, count=3),
)


class Script:
    """Plans of `STEPS`, on scattered pages and slots; what leaves a window is soon another's.

    Args:
        sequences: see `draw_sequences`.
        windows: component space of pages -> tokens that a query sees; 0 for all.
        sizes: component space -> pages or slots.
        seed: of the ids.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], windows: Mapping[str, int], sizes: Mapping[str, int], *, seed: int = 1
    ) -> None:
        generator = np.random.default_rng(seed)
        self._sequences, self._windows = sequences, windows
        self._free = {space: generator.permutation(sizes[space]).tolist() for space in windows}
        states = [size for space, size in sizes.items() if space not in windows]
        self._slots = generator.permutation(states[0]).tolist() if states else []
        self._tables: dict[str, list[list[int]]] = {space: [[] for _ in sequences] for space in windows}
        self._stops = [SHARED if i in HEIRS else 0 for i in range(len(sequences))]
        self._states = [self._state(0) if i in HEIRS else -1 for i in range(len(sequences))]
        self._known: set[int] = set()

    def plans(self) -> list[StepPlan]:
        """All of them; every position is asked for."""
        return [self._plan(number, step) for number, step in enumerate(STEPS, start=1)]

    def _plan(self, number: int, step: Step) -> StepPlan:
        sequences = dict.fromkeys(i for i, _ in step)
        fresh = [i for i in sequences if i not in self._known]
        admits = [Admit(i, self._begin(i), SamplingParams(temperature=0), seed=0) for i in fresh]
        rows = [self._row(i, count) for i, count in step]
        for i in sequences:
            self._leave_windows(i)
        return StepPlan(number, rows, admits, num_top=0)

    def _begin(self, i: int) -> dict[str, list[int]]:
        """Pages of the shared prefix."""
        self._known.add(i)
        for space, window in self._windows.items():
            if i in HEIRS:
                first = _first_page(SHARED, window)
                shared = self._tables[space][0][first : SHARED // PAGE_SIZE]
                self._tables[space][i] = [-1] * first + shared
        return {space: list(tables[i]) for space, tables in self._tables.items()}

    def _row(self, i: int, count: int) -> Row:
        start, stop = self._stops[i], self._stops[i] + count
        self._stops[i] = stop
        read, write = self._states[i], self._state(0 if (i, stop) == (0, SHARED) else 1 + 2 * i + stop // PAGE_SIZE % 2)
        self._states[i] = write
        tokens = self._sequences[i]
        return Row(
            slot=i,
            start=start,
            tokens=_packed(tokens[start:stop]),
            new_pages={space: self._new_pages(i, space, stop) for space in self._windows},
            output_position=0,  # the last one has no next token in the row
            targets=_packed(tokens[start + 1 : stop]),
            read_state=read,
            write_state=write,
        )

    def _state(self, number: int) -> int:
        return self._slots[number] if self._slots else -1

    def _new_pages(self, i: int, space: str, stop: int) -> list[int]:
        table = self._tables[space][i]
        first = _first_page(stop, self._windows[space])
        new = [self._free[space].pop() if page >= first else -1 for page in range(len(table), -(-stop // PAGE_SIZE))]
        table += new
        return new

    def _leave_windows(self, i: int) -> None:
        """Pages that no later query of a sequence sees can be anybody's, but those of the shared prefix."""
        for space, window in self._windows.items():
            table = self._tables[space][i]
            is_heir_or_first = i in (0, *HEIRS)
            for page in range(_first_page(self._stops[i], window)):
                if table[page] >= 0 and not (is_heir_or_first and page < SHARED // PAGE_SIZE):
                    self._free[space].append(table[page])
                    table[page] = -1


def _first_page(position: int, window: int) -> int:
    """The first page that a query at a position sees."""
    return max(0, position - window + 1) // PAGE_SIZE if window else 0


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
