"""One numbered step, the only message from the decider to the ranks.

Plans are encoded as msgpack. Ranks keep a table of slots (page table, sampling state), so a plan has changes only:

    StepPlan 17
      admits  slot 3: pages of its cached prefix, sampling          overwrites what the slot held
      saves   device page 7 -> host page 12, ...                    before this step writes any page
      loads   host page 3 -> device page 9, ...                     before a row reads them, layer by layer
      rows    slot 3: positions 128..383, 256 tokens, 4 new pages   a prefill chunk
              slot 0: position 901, 1 token                         decode
              slot 5: position 77, fed                              decode, its token not yet known to the decider
              slot 6: position 40, 1 token and 3 drafts             decode, yields up to 4 tokens
                      3 next drafts                                 to be drafted for the next row
    StepPlan 18
              slot 6: position 41 or up to 3 later, fed             as many later as drafts are accepted in step 17
                      3 drafts, fed                                 those drafted there

Rows that are a token in and a token out, like those of slots 0 and 5, are sent in columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from types import MappingProxyType
from typing import Any, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from raycache.memory.moves import Batch, Moves
from raycache.parallel.sharding import split_chunk
from raycache.types import PackedTokens, SamplingParams

_NONE: NDArray[np.int64] = np.empty(0, np.int64)
_FIRST: NDArray[np.int64] = np.zeros(1, np.int64)
_ONLY = range(1)  # the only position of a row of one token

PageLists = Mapping[str, Sequence[int]]
"""Component space -> page ids, in sequence order; -1 for a page that is not kept."""

NO_PAGES: PageLists = MappingProxyType({})

_NEW_PAGES, _DRAFT_STATES = 3, 10  # indices of the row fields that are not sent as they are

_SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams) if each.name != "grammar")

Masks = NDArray[np.uint8]
"""Masks of a plan's rows, [num_masks, mask_len], in the order of the rows."""

NO_MASKS: Masks = np.empty((0, 0), np.uint8)

MAX_SCORED_TOKENS = 1024
"""Limit of scored tokens per step, as each needs several rows of vocabulary size. Rows beyond it are scored token by
token."""

UNKNOWN: PackedTokens = (-1).to_bytes(4, "little", signed=True)
"""Placeholder in a fed row for the token that the decider does not know yet."""


def unknown_drafts(count: int) -> PackedTokens:
    """Placeholders in a fed row for draft tokens that the decider does not know yet: -2, -3, ..."""
    return np.arange(-2, -2 - count, -1, dtype=np.int32).tobytes()


@dataclass(frozen=True, slots=True)
class Admit:
    """Assigns a slot to a new request.

    Attributes:
        slot: index into the ranks' table.
        pages: pages of the cached prefix.
        seed: seed of its random numbers.
        prompt, output: packed tokens so far; empty unless penalties need them.
    """

    slot: int
    pages: PageLists
    sampling: SamplingParams
    seed: int
    prompt: PackedTokens = b""
    output: PackedTokens = b""


@dataclass(slots=True)
class Row:
    """New tokens of one request. Do not modify it: it is not frozen only because a frozen one takes thrice as long to
    make, and every running request gets one per step.

    Attributes:
        slot: index into the ranks' table.
        start: position of the first new token, equal to the number of tokens already in the pages.
        tokens: packed ids of the new tokens, at least one.
        new_pages: pages to append to the slot's page tables first.
        output_position: index in the output of the token to sample after the last new one; -1: sample none.
        targets: packed ids whose log-probability to report, the first for the distribution after the first new token;
            empty for none.
        read_state: slot of the recurrent states after `start` tokens, -1 at the beginning of a sequence.
        write_state: slot for the states after the last new token; may be the same. -1 when the model has none.
        is_fed: whether its first new token is the last one that the previous plan samples for this slot, and its draft
            tokens are those that the ranks draft there; `tokens` is UNKNOWN, then `unknown_drafts`. `start`,
            `output_position` and `read_state` are for the case that the previous plan's row accepts no draft token; the
            ranks move the row up by as many as it accepts. There are pages for all of them.
        num_drafts: number of draft tokens at the end of `tokens`. One token is sampled after the last known token,
            and one after each draft token.
        draft_states: slots for the states after each draft token; `write_state` is then for the state after the last
            known token. Empty when the model has none.
        accepted: packed draft tokens of the previous row that were accepted, if penalties count them.
        num_next_drafts: tokens that the ranks' draft model should draft after the last accepted one. There are
            pages for them in any case.
        next_token: token after the last new one, for draft models; -1 if it is to be sampled.
        is_masked: whether only some tokens may be sampled. Their masks come after the plan (see `StepPlan.mask_len`):
            one after the last known token, and one after each draft token.
        stops_at_page: whether no draft token beyond the next page boundary is accepted, where a restore point is due.
    """

    slot: int
    start: int
    tokens: PackedTokens
    new_pages: PageLists = field(default_factory=lambda: NO_PAGES)
    output_position: int = -1
    targets: PackedTokens = b""
    read_state: int = -1
    write_state: int = -1
    is_fed: bool = False
    num_drafts: int = 0
    draft_states: Sequence[int] = ()
    accepted: PackedTokens = b""
    num_next_drafts: int = 0
    next_token: int = -1
    is_masked: bool = False
    stops_at_page: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.tokens) // 4

    @property
    def num_targets(self) -> int:
        """Number of positions to score."""
        return len(self.targets) // 4

    @property
    def first_sampled(self) -> int:
        """Index in the chunk after which the first token is sampled, if any; draft tokens follow it."""
        return self.num_tokens - 1 - self.num_drafts

    @property
    def scored(self) -> range:
        """Indices in the chunk of the positions to score; they end before those that are sampled."""
        return range(min(self.num_targets, self.sampled.start))

    @property
    def sampled(self) -> range:
        """Indices in the chunk of the positions after which a token is sampled."""
        return range(self.first_sampled if self.output_position >= 0 else self.num_tokens, self.num_tokens)

    def most_accepted(self, start: int, *, page_size: int) -> int:
        """Draft tokens that may be accepted if the row begins at `start`."""
        return min(self.num_drafts, left_in_page(start, page_size=page_size)) if self.stops_at_page else self.num_drafts

    @property
    def num_masks(self) -> int:
        """Number of masks."""
        return self.is_masked * (1 + self.num_drafts)


TokenRow = tuple[int, int, PackedTokens, int]
"""Slot, start, token and output position of a row that is a token in and a token out; fed if the token is UNKNOWN."""


class Rows(Sequence[Row]):
    """Rows of a plan. Most rows of most steps say only where a token goes and that the next one is sampled, and making
    a `Row` for each would cost the decider more than all else about them.

    Attributes:
        tokens: of every row; those in `others` have UNKNOWN for a token.
        others: index -> row that is more than a token in and a token out.
    """

    __slots__ = ("_all", "others", "tokens")

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.tokens: list[TokenRow] = []
        self.others: dict[int, Row] = {}
        self._all: list[Row] = []
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        """Append any row; `tokens.append` appends one that is a token in and a token out."""
        self.others[len(self.tokens)] = row
        self.tokens.append((row.slot, row.start, UNKNOWN, row.output_position))

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._made()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({self._made()!r})"

    def _made(self) -> list[Row]:
        """All rows as `Row`, made when somebody asks for them."""
        if len(self._all) < len(self.tokens):
            self._all = _joined(self.tokens, self.others)
        return self._all

    def pack(self) -> list[Any]:
        """For the wire: in columns."""
        slots, starts, tokens, positions = zip(*self.tokens, strict=True) if self.tokens else ((),) * 4
        numbers = (array("q", column).tobytes() for column in (slots, starts, positions))
        return [*numbers, b"".join(tokens), [_packed_row(index, row) for index, row in self.others.items()]]


def _joined(tokens: Iterable[TokenRow], others: Mapping[int, Row]) -> list[Row]:
    rows = [
        Row(slot, start, token, NO_PAGES, position, b"", -1, -1, token == UNKNOWN)
        for slot, start, token, position in tokens
    ]
    for index, row in others.items():
        rows[index] = row
    return rows


def _packed_row(index: int, row: Row) -> list[Any]:
    return [
        index,
        row.slot,
        row.start,
        bytes(row.tokens),
        _packed_ids(row.new_pages) if row.new_pages else {},
        row.output_position,
        bytes(row.targets),
        row.read_state,
        row.write_state,
        row.is_fed,
        row.num_drafts,
        list(row.draft_states),
        bytes(row.accepted),
        row.num_next_drafts,
        row.next_token,
        *([row.is_masked, True] if row.stops_at_page else [True] if row.is_masked else []),
    ]


def _rows(slots: bytes, starts: bytes, positions: bytes, tokens: bytes, others: list[list[Any]]) -> list[Row]:
    """Inverse of `Rows.pack`."""
    numbers = (array("q", column) for column in (slots, starts, positions))
    slot_of, start_of, position_of = numbers
    token_of = [tokens[i : i + 4] for i in range(0, len(tokens), 4)]
    columns = zip(slot_of, start_of, token_of, position_of, strict=True)
    return _joined(columns, {index: _row(row) for index, *row in others})


def left_in_page(start: int, *, page_size: int) -> int:
    """Draft tokens of a row that begins at `start` which do not reach beyond the next page boundary."""
    return page_size - start % page_size - 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank does next.

    Attributes:
        step: number of the plan, counted from 1 without gaps within an epoch.
        rows: the batch; empty for a heartbeat.
        admits: slots to reassign first.
        num_top: maximum alternatives that a row requests; None if no row requests log-probabilities.
        is_last: whether the ranks exit after this plan.
        saves: units to copy to the host; they were written in earlier steps.
        loads: units to copy to the device, read by rows of this step.
        is_saved_first: whether this step overwrites saved units, so that saves must end before loads and rows begin.
        mask_len: bytes of a mask: a bit per token id that may be sampled, least significant first. Masks follow in a
            message of their own, before the next plan, so that they are made while the layers run; 0 if no row has any.
    """

    step: int
    rows: Sequence[Row] = ()
    admits: Sequence[Admit] = ()
    num_top: int | None = None
    is_last: bool = False
    saves: Sequence[Moves] = ()
    loads: Sequence[Moves] = ()
    is_saved_first: bool = False
    mask_len: int = 0

    @property
    def first_masks(self) -> list[int]:
        """Index of each row's first mask, and behind them the number of all masks."""
        return list(accumulate((row.num_masks for row in self.rows), initial=0))

    def masks_allowing_all(self) -> Masks:
        """Masks for its rows that forbid nothing."""
        return np.full((self.first_masks[-1], self.mask_len), 255, np.uint8)

    def pack(self) -> bytes:
        """Encode for the wire."""
        admits = [
            [a.slot, _packed_ids(a.pages), _packed(a.sampling), a.seed, bytes(a.prompt), bytes(a.output)]
            for a in self.admits
        ]
        rows = self.rows if isinstance(self.rows, Rows) else Rows(self.rows)
        moves = [[[m.number, [_columns(b) for b in m.batches]] for m in lane] for lane in (self.saves, self.loads)]
        packed: bytes = msgpack.packb(
            [
                self.step,
                rows.pack(),
                admits,
                self.num_top,
                self.is_last,
                *moves,
                self.is_saved_first,
                *([self.mask_len] if self.mask_len else []),
            ]
        )
        return packed

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> StepPlan:
        """Inverse of `pack`."""
        step, rows, admits, num_top, is_last, saves, loads, is_saved_first, *mask_len = msgpack.unpackb(
            packed, strict_map_key=False
        )
        return cls(
            step=step,
            rows=_rows(*rows),
            admits=[Admit(a[0], _ids(a[1]), _sampling(a[2]), *a[3:]) for a in admits],
            num_top=num_top,
            is_last=is_last,
            saves=_moves(saves),
            loads=_moves(loads),
            is_saved_first=is_saved_first,
            mask_len=mask_len[0] if mask_len else 0,
        )


def _row(wire: list[Any]) -> Row:
    if wire[_NEW_PAGES]:
        wire[_NEW_PAGES] = _ids(wire[_NEW_PAGES])
    wire[_DRAFT_STATES] = tuple(wire[_DRAFT_STATES])
    return Row(*wire)


def _columns(batch: Batch) -> tuple[str, bytes, bytes, bytes]:
    return batch.space, batch.devices.tobytes(), batch.hosts.tobytes(), batch.tags.tobytes()


def _moves(lane: list[tuple[int, list[tuple[str, bytes, bytes, bytes]]]]) -> tuple[Moves, ...]:
    return tuple(Moves(number, [_batch(*columns) for columns in batches]) for number, batches in lane)


def _batch(space: str, devices: bytes, hosts: bytes, tags: bytes) -> Batch:
    return Batch(
        space, np.frombuffer(devices, np.int64), np.frombuffer(hosts, np.int64), np.frombuffer(tags, np.uint64)
    )


def _packed_ids(pages: PageLists) -> dict[str, bytes]:
    """As bytes, since a prompt may have thousands."""
    return {space: array("q", ids).tobytes() for space, ids in pages.items()}


def _ids(packed: Mapping[str, bytes]) -> PageLists:
    return {space: array("q", ids) for space, ids in packed.items()}


def _packed(sampling: SamplingParams) -> dict[str, Any]:
    """Without the grammar: ranks get masks."""
    return {name: getattr(sampling, name) for name in _SAMPLING_NAMES}


def _sampling(wire: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**wire, "stop": tuple(wire["stop"]), "stop_token_ids": tuple(wire["stop_token_ids"])})


def local_positions(plan: StepPlan, *, cp_rank: int, cp_size: int) -> list[NDArray[np.int64]]:
    """New tokens of each row that a cp rank computes: indices into the row's chunk, in order of computation."""
    return [_positions(row, cp_rank, cp_size, turn=i) for i, row in enumerate(plan.rows)]


def is_emitted(row: Row, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether logits are used at each of a rank's positions in a row: at scored and sampled ones."""
    wanted = positions < row.num_targets
    if row.output_position >= 0:
        wanted |= positions >= row.first_sampled
    return wanted


def _positions(row: Row, cp_rank: int, cp_size: int, *, turn: int) -> NDArray[np.int64]:
    if row.num_tokens == 1:
        return _FIRST if turn % cp_size == cp_rank else _NONE
    runs = split_chunk(row.num_tokens, cp_rank, cp_size, turn=turn)
    return np.concatenate([_NONE, *(np.arange(run.start, run.stop) for run in runs)])
