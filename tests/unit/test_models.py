"""Models against transformers on the same weights."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.cp_split import CpSplit
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.norm import CenteredNorm, HeadNorm, RMSNorm
from raycache.memory.component import CacheFormat
from raycache.models.base import check_split, components, load_model, read_config
from raycache.models.decoder import Decoder, Residual
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.staged import staged
from tests.oracle.tiny import ROPES, make_tiny, oracle_logits

CPU = torch.device("cpu")
IDS = torch.randint(3, 515, (200,), generator=torch.Generator().manual_seed(1))


class Causal:
    """Attention over one whole sequence, without a cache; the "view" of a layer is its number."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def kv(self, layer: int) -> int:
        return layer

    def attend(self, view: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: None) -> Tensor:
        self.seen.append(view)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True, scale=scale)
        return out[0].transpose(0, 1)


def whole_pass(length: int, causal: Causal | None = None) -> ForwardPass:
    causal = causal or Causal()
    return ForwardPass(causal, causal, torch.arange(length))


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def logits(model_dir: Path, ids: Tensor, ctx: ParallelContext) -> Tensor:
    config = read_config(model_dir)
    model = load_model(config, Checkpoint(model_dir), ctx, torch.float32, on_progress=quiet)
    with torch.inference_mode():
        return model.logits(model.forward(model.embed(ids), whole_pass(len(ids))))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{kind}": ("llama", {"rope_parameters": rope}) for kind, rope in ROPES.items()},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-all-heads-keep-kv": ("llama", {"num_key_value_heads": 8}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-wider-than-hidden": ("llama", {"head_dim": 32}),
    "llama-nine-heads": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 100},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": ROPES["yarn"]}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(variant: str) -> Path:
        model_type, settings = VARIANTS[variant]
        model_dir = root / variant
        return model_dir if model_dir.exists() else make_tiny(model_dir, model_type, **settings)

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_and_every_tensor_is_used(tiny: Callable[[str], Path], variant: str) -> None:
    model_dir = tiny(variant)
    config, checkpoint = read_config(model_dir), Checkpoint(model_dir)
    model = load_model(config, checkpoint, ParallelContext.single(CPU), torch.float32, on_progress=quiet)
    with torch.inference_mode():
        ours = model.logits(model.forward(model.embed(IDS), whole_pass(len(IDS))))
    oracle = oracle_logits(model_dir, IDS)
    assert (ours - oracle).abs().max() < 1e-5 * oracle.std()  # tied heads have logits of spread 8
    assert checkpoint.unread() == []


class ThreadGroup(Group):
    """Ranks as threads of this process: a real sum and a real gather, without processes."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank=rank, size=len(board))
        self._board, self._barrier = board, barrier

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._board[self.rank] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack(self._board)
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.all_gather(tensor).sum(0))


def on_threads(size: int, run: Callable[[ThreadGroup], Tensor]) -> list[Tensor]:
    board, barrier, results = [None] * size, threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def rank(index: int) -> None:
        try:
            results[index] = run(ThreadGroup(index, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("variant", "tp"),
    [
        *product(["llama-biases", "llama-tied", "llama-one-kv-head", "qwen3-tied-yarn"], [2, 4, 8]),
        *product(["llama-nine-heads"], [3, 9]),  # whose MLPs have 100 inner features
    ],
)
def test_any_tp_gives_the_same_logits_on_every_rank(tiny: Callable[[str], Path], variant: str, tp: int) -> None:
    model_dir = tiny(variant)
    whole = logits(model_dir, IDS, ParallelContext.single(CPU))

    def share(group: ThreadGroup) -> Tensor:
        return logits(model_dir, IDS, ParallelContext(Split(tp=tp), group.rank, CPU, tp=group))

    for rank_logits in on_threads(tp, share):
        torch.testing.assert_close(rank_logits, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3"])
def test_pipeline_stages_give_the_same_logits(tiny: Callable[[str], Path], variant: str, pp: int) -> None:
    model_dir = tiny(variant)
    config, source = read_config(model_dir), Checkpoint(model_dir)
    split, causal = staged(Split(pp=pp), config.num_layers), Causal()
    stages = [
        load_model(config, source, ParallelContext(split, rank, CPU, pp=Group(rank=rank, size=pp)),
                   torch.float32, on_progress=quiet)
        for rank in range(pp)
    ]  # fmt: skip
    with torch.inference_mode():
        hidden = stages[0].embed(IDS)
        for stage in stages:
            hidden = stage.forward(hidden, whole_pass(len(IDS), causal))
        ours = stages[-1].logits(hidden)
    assert torch.equal(ours, logits(model_dir, IDS, ParallelContext.single(CPU)))
    assert causal.seen == [0, 1, 2, 3]


def test_bfloat16_stays_close_to_transformers(tiny: Callable[[str], Path]) -> None:
    model_dir = tiny("qwen3")
    config = read_config(model_dir)
    model = load_model(config, Checkpoint(model_dir), ParallelContext.single(CPU), torch.bfloat16, on_progress=quiet)
    with torch.inference_mode():
        ours = model.logits(model.forward(model.embed(IDS), whole_pass(len(IDS))))
    assert ours.dtype == torch.float32
    assert (ours - oracle_logits(model_dir, IDS)).abs().mean() < 0.05


def test_no_tokens_are_no_work(tiny: Callable[[str], Path]) -> None:
    none = logits(tiny("llama-biases"), IDS[:0], ParallelContext.single(CPU))
    assert none.shape == (0, 515)


def test_the_component_is_keys_and_values_of_every_layer(tiny: Callable[[str], Path]) -> None:
    (kv,) = components(read_config(tiny("qwen3")), CacheFormat("bfloat16"))
    assert (kv.name, kv.layers) == ("kv", (0, 1, 2, 3))
    fields = [(field.name, field.shape, field.head_axis, field.num_bytes) for field in kv.fields]
    assert fields == [("k", (2, 16), 0, 64), ("v", (2, 16), 0, 64)]


def test_a_split_is_refused_with_the_values_that_meet_every_condition(tiny: Callable[[str], Path]) -> None:
    config: Any = read_config(tiny("qwen3"))
    nine = dataclasses.replace(config.attention, num_heads=9, num_kv_heads=3)
    smollm = dataclasses.replace(config, name="smol", attention=nine, intermediate_size=1536)
    for tp in (1, 3, 9):
        check_split(smollm, Split(tp=tp, pp=4))
    with pytest.raises(
        ConfigError, match=r"^tp=2 does not divide num_attention_heads=9 of smol; use one of \[1, 3, 9\]$"
    ):
        check_split(smollm, Split(tp=2))
    twelve = dataclasses.replace(smollm, attention=dataclasses.replace(nine, num_heads=12, num_kv_heads=6))
    with pytest.raises(ConfigError, match=r"tp=4 neither divides nor .* num_key_value_heads=6 .* \[1, 2, 3, 6, 12\]"):
        check_split(twelve, Split(tp=4))
    with pytest.raises(ConfigError, match=r"pp=5 exceeds num_hidden_layers=4"):
        check_split(config, Split(pp=5))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("vocab_size", r"embed_tokens\.weight .* \[2147483647, 64\]"),
        ("intermediate_size", r"mlp\.gate_proj\.weight .* \[2147483647, 64\]"),
        ("num_heads", r"self_attn\.q_proj\.weight .* \[34359738352, 64\]"),
    ],
)
def test_a_size_that_no_memory_has_is_refused_before_any_is_taken(
    tiny: Callable[[str], Path], key: str, tensor: str
) -> None:
    config: Any = read_config(tiny("llama-biases"))
    if key == "num_heads":
        attention = dataclasses.replace(config.attention, num_heads=2**31 - 1, num_kv_heads=1)
        config = dataclasses.replace(config, attention=attention)
    else:
        config = dataclasses.replace(config, **{key: 2**31 - 1})
    checkpoint = Checkpoint(tiny("llama-biases"))
    ctx = ParallelContext(
        Split(pp=4, stages=(1, 1, 1, 1)), 0 if key == "vocab_size" else 1, CPU, pp=Group(rank=0, size=4)
    )
    with pytest.raises(CheckpointError, match=tensor):
        load_model(config, checkpoint, ctx, torch.float32, on_progress=quiet)


def test_a_head_norm_of_precise_weights_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 16, generator=generator).bfloat16()
    weight = 1 + 0.1 * torch.randn(3, 16, generator=generator)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    ours = HeadNorm(weight, 1e-6)(x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=0)  # half a step of bfloat16


class Product:
    """A mixer that multiplies by a matrix."""

    is_position_wise = True

    def __init__(self, by: Tensor) -> None:
        self._by = by

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return x @ self._by

    def over_cp(self, split: CpSplit) -> Product:
        raise NotImplementedError


def test_additions_left_to_the_next_norm_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def mixer() -> Mixer:
        return Product(drawn(16, 16))

    parts: list[Mixer] = [
        Residual(RMSNorm(drawn(16), 1e-6), mixer()),
        Residual(CenteredNorm(drawn(16), 1e-6), mixer(), after=RMSNorm(drawn(16), 1e-6)),
        Residual(RMSNorm(drawn(16), 1e-6), mixer(), scale=0.5),
        Residual(RMSNorm(drawn(16), 1e-6), mixer()),
        mixer(),  # one that adds up in its own way
        Residual(RMSNorm(drawn(16), 1e-6), mixer()),
    ]
    run, hidden = whole_pass(7), drawn(7, 16)
    together = Decoder({0: parts[:2], 1: parts[2:]}, embedding=None, norm=None, head=None).forward(hidden.clone(), run)
    for part in parts:
        hidden = part(hidden, run)
    assert torch.equal(together, hidden)


def test_loading_a_wrong_config_names_the_tensor(tiny: Callable[[str], Path]) -> None:
    model_dir = tiny("llama-tied")
    config = dataclasses.replace(read_config(model_dir), intermediate_size=192)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight .* \[96, 64\], config\.json wants \[192, 64\]"):
        load_model(config, Checkpoint(model_dir), ParallelContext.single(CPU), torch.float32, on_progress=quiet)
