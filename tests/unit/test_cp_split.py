"""Decode steps with weights split over cp: results, that weights are views, what is left whole and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.attention.states import Recurrence
from raycache.attention.torch_ref import TorchBackend, TorchStep
from raycache.config import Config
from raycache.deployment.decode_split import decode_obstacle, model_obstacle, with_transports
from raycache.deployment.deployment import Deployment, served_model
from raycache.layers.cp_split import CpSplit, NotSplitError
from raycache.layers.embedding import VocabHead
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.quantised import Fp8Matrix
from raycache.memory.component import FULL, STATE, CacheFormat
from raycache.memory.device import DevicePool
from raycache.models.base import components, head_of, load_model, read_config
from raycache.parallel.collectives import Group, TorchGroup
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.graphs import stage_layers
from raycache.rank.rank import Rank
from raycache.step.inputs import RowInputs
from raycache.step.page_tables import PageTables
from raycache.step.single_rows import emitted_tokens, is_decode
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan
from tests.oracle.draft_models import make_predicting, make_target
from tests.oracle.families import make_family
from tests.oracle.gang import Piece, gang_logits, on_gang
from tests.oracle.golden import golden
from tests.oracle.weights import open_weights

LENGTHS = (42, 37, 30)
IDS = [np.random.default_rng(seed).integers(3, 515, length).tolist() for seed, length in enumerate(LENGTHS)]
STEPS: list[list[Piece]] = [
    [(0, 0, 34), (1, 0, 30), (2, 0, 27)],
    *([(row, first + i, first + i + 1) for row, first in enumerate((34, 30, 27))] for i in range(3)),
    *([(row, first + i, first + i + 1) for row, first in enumerate((34, 30))] for i in range(3, 7)),  # cp divides them
    [(0, 41, 42)],
]
"""Prompts, then three, two and one row of one token each."""

CASES = [
    ("llama", Split(tp=2, cp=2)),
    ("qwen3", Split(cp=4)),
    ("deepseek_v32", Split(tp=2, cp=2)),  # latents, an indexer, experts
    ("gpt_oss", Split(cp=2)),  # windows, sinks, biases of experts
    ("gemma4", Split(tp=2, cp=2)),  # a capped, tied head; experts beside an MLP
    ("minimax_m2", Split(tp=2, cp=2)),  # norms over all heads
    ("qwen3_next", Split(tp=2, cp=2)),  # gated delta net, gated attention, gated shared expert
    ("nemotron_h", Split(cp=2)),  # Mamba2, an MLP without gate
    ("falcon_h1", Split(cp=2)),  # mixers in parallel, scaled
    ("kimi_k3", Split(tp=2, cp=2)),  # KDA, latents with a gate, latent experts, attention residuals
    ("minimax", Split(cp=2)),  # lightning attention, weighted residuals
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else make_family(root / name, name)

    return make


def quiet(done: int, total: int) -> None:
    """Nobody waits."""


def group(rank: int, size: int) -> CpSplit:
    return CpSplit(Group(rank=rank, size=size), Group(rank=rank, size=size))


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "split"), CASES, ids=str)
def test_logits_equal_transformers(tiny: Callable[[str], Path], family: str, split: Split) -> None:
    oracle = golden(tiny(family), IDS)
    found = gang_logits(tiny(family), IDS, STEPS, split=split, splits_decode=True)
    assert max(np.abs(a - b).max() for a, b in zip(found, oracle.logits, strict=True)) < oracle.atol


def test_in_float64_only_rounding_is_left(tiny: Callable[[str], Path]) -> None:
    split = Split(tp=2, cp=2)
    wanted = gang_logits(tiny("llama"), IDS, STEPS, split=split, dtype=torch.float64)
    found = gang_logits(tiny("llama"), IDS, STEPS, split=split, dtype=torch.float64, splits_decode=True)
    assert 0 < max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 1e-12


def test_a_rank_with_the_share_of_another_is_noticed(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpSplit, "part", lambda self, size, *, what: slice(0, size // self.cp.size))
    oracle = golden(tiny("llama"), IDS)
    found = gang_logits(tiny("llama"), IDS, STEPS, split=Split(cp=2), splits_decode=True)
    assert max(np.abs(a - b).max() for a, b in zip(found, oracle.logits, strict=True)) > 100 * oracle.atol


# --- draft tokens, and what CUDA graphs record ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("split", [Split(cp=2), Split(tp=2, cp=2)], ids=str)
def test_steps_with_drafts_and_recorded_ones_give_what_others_do(
    tiny: Callable[[str], Path], family: str, split: Split
) -> None:
    """The recorded function is run instead, with padding rows and with other rows than at first."""
    config = read_config(tiny(family))
    parts = components(config, CacheFormat("float32"))
    spaces = {FULL: 0, **{part.space: part.window for part in parts if part.space != STATE}}
    pages = {slot: [6 * slot + page for page in range(6)] for slot in range(3)}
    tables = {space: PageTables() for space in spaces}
    for table in tables.values():
        for slot, ids in pages.items():
            table.begin(slot, ids)
    sampling = SamplingParams(temperature=0)
    admits = [Admit(slot, dict.fromkeys(spaces, ids), sampling, seed=0) for slot, ids in pages.items()]
    prefill = StepPlan(1, [_row(slot, 0, ids[:29], -1, [slot]) for slot, ids in enumerate(IDS)], admits)
    decodes = [
        StepPlan(2, [_row(slot, 29, IDS[slot][29:30], slot, [3 + slot]) for slot in (0, 1, 2)]),
        StepPlan(3, [_row(2, 30, IDS[0][:4], 5, [5, 6, 7, 8]), _row(0, 30, IDS[0][30:31], 3, [3])]),
        StepPlan(4, [_row(1, 30, IDS[1][30:33], 4, [4, 0, 1]), _row(2, 31, IDS[1][:4], 5, [9, 10, 11, 6])]),
        StepPlan(5, [_row(1, 31, IDS[1][31:32], 4, [2])]),
    ]

    def work(ctx: ParallelContext) -> None:
        source = open_weights(tiny(family), dtype=torch.float32, device=ctx.device)
        model = load_model(config, source, ctx, torch.float32, on_progress=quiet)
        decode_model = model.over_cp(CpSplit.of(ctx))
        sizes = dict.fromkeys(spaces, 18) | ({STATE: 12} if any(part.space == STATE for part in parts) else {})
        pools = [
            DevicePool(parts, num_layers=config.num_layers, sizes=sizes, page_size=8, ctx=ctx, has_scratch=True)
            for _ in range(3)
        ]
        backend = TorchBackend()
        whole = Rank(ctx, config, model, pools[0], backend, torch.float32)
        split = Rank(ctx, config, model, pools[1], backend, torch.float32, decode_model=decode_model)
        recorded = stage_layers(decode_model, widths=(), is_last=True)
        batches = [DecodeBatch(size, pools[2], ctx, longest=4, has_all_tokens=True) for size in (1, 3, 8)]
        Rank(ctx, config, model, pools[2], backend, torch.float32).forward(prefill)
        torch.testing.assert_close(whole.forward(prefill), split.forward(prefill), rtol=0, atol=0)
        for plan in decodes:
            wanted, found = whole.forward(plan), split.forward(plan)
            assert wanted is not None
            torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5)
            if any(spaces.values()):  # windows under cp are not recorded
                continue
            num_tokens = sum(row.num_tokens for row in plan.rows)
            batch = next(batch for batch in batches if len(batch.inputs.ids) >= num_tokens)
            batch.fill(plan, tables)
            run = ForwardPass(StaticStep(batch.inputs, expanded_bytes=0), pools[2], batch.inputs.positions)
            part, _ = recorded(batch.inputs.ids, None, run)
            logits = head_of(decode_model).gathered(part)
            assert len(logits) == len(batch.inputs.ids) and batch.num_local == num_tokens
            own = emitted_tokens(plan, cp_rank=ctx.cp.rank, cp_size=ctx.cp.size)
            torch.testing.assert_close(logits[own], wanted, rtol=0, atol=3e-5)

    on_gang(split, work)


@pytest.mark.parametrize(
    ("row", "has_states", "is_split"),
    [
        (Row(0, 5, bytes(4), output_position=0), True, True),
        (Row(0, 5, bytes(12), output_position=0, num_drafts=2), False, True),
        (Row(0, 5, bytes(12), output_position=0, num_drafts=2), True, False),
        (Row(0, 5, bytes(12), output_position=0, num_drafts=1), False, False),  # two known tokens
        (Row(0, 5, bytes(12), output_position=0), False, False),
        (Row(0, 5, bytes(12), output_position=0, num_drafts=2, targets=bytes(4)), False, False),
    ],
    ids=str,
)
def test_which_rows_are_computed_whole_on_every_rank(row: Row, has_states: bool, is_split: bool) -> None:
    plan = StepPlan(1, [Row(1, 3, bytes(4), output_position=0), row])
    assert is_decode(plan, has_states=has_states) == is_split


class StaticStep(TorchStep):
    """A step with the recurrent rows of a CUDA graph, read from its tensors."""

    @cached_property
    def recurrent(self) -> Recurrence:
        inputs = self._layout.inputs
        assert inputs.state_rows is not None
        spans, reads, writes = (getattr(inputs.state_rows, name).tolist() for name in ("spans", "reads", "writes"))
        rows = [
            RowInputs(
                1, range(first, first + count), range(0), (), read, writes[first], writes[first + 1 :][: count - 1]
            )
            for (first, count), read in zip(spans, reads, strict=True)
            if count
        ]
        return Recurrence(StepLayout(replace(inputs, rows=tuple(rows), is_decode=False)))


def _row(slot: int, start: int, ids: list[int], read: int, writes: list[int]) -> Row:
    """A row that leaves a state behind each token from the first that is sampled on."""
    return Row(
        slot,
        start,
        np.asarray(ids, np.int32).tobytes(),
        output_position=0,
        num_drafts=len(writes) - 1,
        read_state=read,
        write_state=writes[0],
        draft_states=tuple(writes[1:]),
    )


# --- weights are views ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "kimi_linear"])
def test_split_weights_are_views_and_every_layer_has_some(tiny: Callable[[str], Path], family: str) -> None:
    config = read_config(tiny(family))
    ctx = ParallelContext(Split(cp=2), 1, torch.device("cpu"), cp=Group(rank=1, size=2))
    source = open_weights(tiny(family), dtype=torch.float32, device=ctx.device)
    model: Any = load_model(config, source, ctx, torch.float32, on_progress=quiet)
    split: Any = model.over_cp(CpSplit.of(ctx))
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(model)}
    for whole, own in zip(model._parts, split._parts, strict=True):
        held = [tensor for tensor in _tensors(own) if tensor.dim() > 1]
        assert all(tensor.untyped_storage().data_ptr() in known for tensor in held)
        if held:
            assert sum(map(Tensor.numel, held)) < sum(tensor.numel() for tensor in _tensors(whole) if tensor.dim() > 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors but biases that are reachable from the attributes of a layer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("raycache.") and "parallel" not in type(value).__module__:
        yield from _tensors([item for name, item in vars(value).items() if "bias" not in name])


@given(
    cp=st.sampled_from([2, 3, 4]),
    share=st.integers(1, 4),
    inputs=st.integers(1, 5),
    matrices=st.integers(1, 2),
    has_bias=st.booleans(),
)
def test_shares_of_columns_make_the_whole(cp: int, share: int, inputs: int, matrices: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    size = matrices * cp * share
    weight, x = (torch.randn(*shape, generator=generator).double() for shape in ((size, inputs), (3, inputs)))
    layer = ColumnLinear(weight, torch.randn(size, generator=generator).double() if has_bias else None)
    parts = [
        layer.own_features(group(rank, cp), matrices=matrices)(x).unflatten(1, (matrices, -1)) for rank in range(cp)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2).flatten(1), layer(x))
    whole = on_gang(Split(cp=cp), lambda ctx: layer.over_cp(CpSplit.of(ctx))(x))
    assert all(torch.allclose(found, layer(x)) for found in whole)


@given(cp=st.sampled_from([2, 3, 4]), share=st.integers(1, 4), is_input_split=st.booleans())
def test_shares_of_rows_add_up_to_the_whole(cp: int, share: int, is_input_split: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, cp * share, generator=generator).double() for rows in (5, 3))
    layer = RowLinear(weight, torch.randn(5, generator=generator).double(), Group())

    def work(ctx: ParallelContext) -> Tensor:
        split = CpSplit.of(ctx)
        own = x[:, split.part(x.shape[1], what="features")] if is_input_split else x
        return layer.over_cp(split, is_input_split=is_input_split)(own)

    for found in on_gang(Split(cp=cp), work):
        torch.testing.assert_close(found, layer(x))


@pytest.mark.parametrize("vocab_size", [24, 22, 21])
def test_the_head_gives_the_logits_of_the_vocabulary_in_order(vocab_size: int) -> None:
    weight, hidden = torch.randn(24, 6), torch.randn(3, 6)
    weight[vocab_size:] = 0

    def work(ctx: ParallelContext) -> Tensor:
        own = weight.unflatten(0, (2, 12))[ctx.tp.rank]
        return VocabHead(own, vocab_size, ctx.tp).over_cp(CpSplit.of(ctx))(hidden)

    for found in on_gang(Split(tp=2, cp=3), work):
        torch.testing.assert_close(found, (hidden @ weight.T)[:, :vocab_size])


def test_a_head_that_cp_does_not_divide_stays_whole() -> None:
    head = VocabHead(torch.randn(7, 4), 7, Group())
    assert head.over_cp(group(1, 2)) is head


# --- what is not split ------------------------------------------------------------------------------------------------


def test_why_a_model_is_not_split(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    config = read_config(tiny("llama"))
    assert not model_obstacle(config, tp=2, cp=4)
    assert model_obstacle(config, tp=1, cp=16) == "cp=16 does not divide the 8 attention heads of a rank"
    assert model_obstacle(config, tp=8, cp=2) == "cp=2 does not divide the 1 attention heads of a rank"
    odd = json.loads((tiny("llama") / "config.json").read_text()) | {"intermediate_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    # 50 inner features on one tp rank, 49 on the other.
    assert model_obstacle(read_config(tmp_path), tp=2, cp=2) == "cp=2 does not divide the 49 output features of a rank"


def test_views_on_gpus_begin_at_multiples_of_16_bytes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    settings = json.loads((tiny("llama") / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_config(tmp_path)
    assert not model_obstacle(config, tp=2, cp=2, device_type="cuda")
    reason = "12 input features per rank are not a multiple of 8"
    assert model_obstacle(config, tp=2, cp=4, device_type="cuda") == reason
    assert not model_obstacle(config, tp=2, cp=4)


def test_quantised_weights_are_not_split() -> None:
    matrix = Fp8Matrix(torch.zeros(16, 128).to(torch.float8_e4m3fn), torch.ones(1, 16), None, num_inputs=128)
    for build in (ColumnLinear(matrix, None).over_cp, RowLinear(matrix, None, Group()).over_cp):
        with pytest.raises(NotSplitError, match="quantised"):
            build(group(0, 2))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"decode_split": "on"}, ""),
        ({"decode_split": "off"}, "decode_split=off"),
        ({"decode_split": "auto"}, "a rank would read 0 MB per layer less"),
        ({"decode_split": "on", "draft": "ngram"}, ""),
        ({"decode_split": "on", "cp": 16, "page_size": 16}, "cp=16 does not divide the 8 attention heads"),
    ],
    ids=str,
)
def test_settings_decide(tiny: Callable[[str], Path], settings: dict[str, Any], reason: str) -> None:
    config = Config(**{"model": str(tiny("llama")), "cp": 2, "device": "cpu", **settings})
    found = decode_obstacle(Deployment(config, read_config(tiny("llama")), "cpu"))
    assert found.startswith(reason) if reason else not found


def test_a_draft_model_must_be_split_too(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama")
    few = {"num_attention_heads": 2, "num_key_value_heads": 2}
    drafts = {"fits": make_target(tmp_path / "fits", "gemma3"), "few": make_target(tmp_path / "few", "llama", **few)}
    for name, cp, reason in (
        ("fits", 4, ""),
        ("few", 2, ""),
        ("few", 4, "the draft model: cp=4 does not divide the 2"),
    ):
        config = Config(model=str(target), cp=cp, device="cpu", decode_split="on", draft=str(drafts[name]))
        found = decode_obstacle(Deployment(config, served_model(config), "cpu"))
        assert found.startswith(reason) if reason else not found


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next", "bailing_hybrid", "qwen3_5"])
def test_prediction_layers_are_split_with_their_models(tmp_path: Path, family: str) -> None:
    config = Config(model=str(make_predicting(tmp_path, family)), cp=2, decode_split="on", draft="mtp")
    assert not decode_obstacle(Deployment(config, served_model(config), "cpu"))


@pytest.mark.parametrize("is_of_draft", [False, True])
def test_a_draft_model_that_stays_quantised_is_not_split(tmp_path: Path, is_of_draft: bool) -> None:
    target, draft = (make_target(tmp_path / name, "llama") for name in ("target", "draft"))
    one = draft if is_of_draft else target
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    settings = json.loads((one / "config.json").read_text()) | {"quantization_config": fp8}
    (one / "config.json").write_text(json.dumps(settings))
    config = Config(model=str(target), cp=2, device="cuda", decode_split="on", draft=str(draft), dtype="bfloat16")
    found = decode_obstacle(Deployment(config, served_model(config), "cuda"))
    assert found == ("those of the draft model " if is_of_draft else "they ") + "stay quantised on the device"


def test_large_layers_are_split_by_themselves(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    large = json.loads((tiny("llama") / "config.json").read_text()) | {"hidden_size": 1024, "intermediate_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(large))
    config, model = Config(model=str(tmp_path), cp=2, device="cpu"), read_config(tmp_path)
    assert not decode_obstacle(Deployment(config, model, "cpu"))  # 26 MB of 52
    assert decode_obstacle(Deployment(config, model, "cuda")).startswith("a rank would read 26 MB per layer less")


def test_exchanges_through_nccl_pay_for_larger_layers_only(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    larger = json.loads((tiny("llama") / "config.json").read_text()) | {"hidden_size": 1024, "intermediate_size": 20480}
    (tmp_path / "config.json").write_text(json.dumps(larger))
    config, model = Config(model=str(tmp_path), cp=2, device="cuda"), read_config(tmp_path)
    assert not decode_obstacle(Deployment(config, model, "cuda"))  # 127 MB of 254
    assert decode_obstacle(Deployment(replace(config, peer_memory=False), model, "cuda"))


@pytest.mark.parametrize(
    ("transports", "is_split"),
    [
        ([("peer memory",), ("peer memory",)], True),
        ([("NCCL",), ("NCCL",)], False),
        ([("peer memory",), ("NCCL",)], False),
        ([("peer memory",), ("NCCL", "peer memory")], False),
    ],
    ids=["all", "none", "one rank", "not all groups of a rank"],
)
def test_exchanges_count_as_they_are_and_not_as_they_were_set(
    tiny: Callable[[str], Path], tmp_path: Path, transports: list[tuple[str, ...]], is_split: bool
) -> None:
    larger = json.loads((tiny("llama") / "config.json").read_text()) | {"hidden_size": 1024, "intermediate_size": 20480}
    (tmp_path / "config.json").write_text(json.dumps(larger))
    config = Config(model=str(tmp_path), cp=2, device="cuda")
    deployment = with_transports(Deployment(config, read_config(tmp_path), "cuda"), transports)
    assert is_split == (not decode_obstacle(deployment))


def test_transports_are_those_of_all_groups_of_a_stage() -> None:
    def group(transport: str) -> TorchGroup:
        return TorchGroup(None, rank=0, size=2, transport=transport)

    cpu, split = torch.device("cpu"), Split(tp=2, cp=2)
    tp, cp, nccl = group("peer memory"), group("peer memory"), group("NCCL")
    assert ParallelContext(split, 0, cpu, tp=tp, cp=cp, tp_cp=tp).transports == ("peer memory",)
    assert ParallelContext(split, 0, cpu, tp=tp, cp=nccl, tp_cp=tp).transports == ("NCCL", "peer memory")
    assert ParallelContext(Split(pp=2), 0, cpu, pp=nccl).transports == ()
