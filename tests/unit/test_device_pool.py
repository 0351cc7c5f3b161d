"""Pools made of components: every field has bytes and a view, and takes the memory that was planned for it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from raycache.errors import ConfigError
from raycache.memory.component import (
    CacheFormat,
    Component,
    Reuse,
    RowField,
    index_keys,
    kv,
    latent,
    recurrent,
)
from raycache.memory.device import DevicePool, unit_bytes
from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.models.base import check_split, components, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.staged import staged

FLOAT32 = CacheFormat("float32")
SIZES = {"full": 6, "window": 5, "state": 3}


def context(split: Split, rank: int) -> ParallelContext:
    """A rank whose groups only know their size."""
    at = split.coords(rank)
    groups = {axis: Group(rank=getattr(at, axis), size=getattr(split, axis)) for axis in ("tp", "pp", "cp")}
    return ParallelContext(split, rank, torch.device("cpu"), **groups)


def pool_of(*parts: Component, num_layers: int = 4) -> DevicePool:
    return DevicePool(parts, num_layers=num_layers, sizes=SIZES, page_size=8, ctx=context(Split(), 0))


def test_a_component_says_what_is_missing_when_it_is_made() -> None:
    field = RowField("k", (2, 8), "float32", head_axis=0)
    with pytest.raises(ConfigError, match="has no layers or no fields"):
        Component("kv", (), (field,))
    with pytest.raises(ConfigError, match="'k' of component 'kv' has a row without bytes"):
        Component("kv", (0,), (RowField("k", (2, 0), "float32"),))
    with pytest.raises(ConfigError, match="row without bytes"):
        Component("kv", (0,), (RowField("k", (2, 8), "complex64"),))
    with pytest.raises(ConfigError, match="window=0 and reuse=last_window"):
        Component("kv", (0,), (field,), Reuse.LAST_WINDOW)


def test_a_component_without_a_view_is_refused_when_the_pool_is_made() -> None:
    with pytest.raises(ConfigError, match=r"'odd' has fields \['k', 'z'\] that no view can serve"):
        pool_of(Component("odd", (0,), (RowField("k", (2,), "float32"), RowField("z", (2,), "float32"))))


def test_every_kind_of_component_has_its_view() -> None:
    pool = pool_of(
        kv("kv", [0], heads=2, dim=8, fmt=FLOAT32),
        kv("window", [1], heads=2, dim=8, fmt=FLOAT32, window=4),
        latent([2], rank=16, rope_dim=4, fmt=FLOAT32),
        index_keys([2], dim=8, fmt=FLOAT32),
        recurrent([3], heads=2, key_dim=4, value_dim=6, fmt=FLOAT32, conv=[("x", 2, 6)], conv_kernel=4),
    )
    assert isinstance(pool.kv(0), KVView) and isinstance(pool.kv(1), KVView)
    assert (pool.kv(0).window, pool.kv(0).space, pool.kv(1).window, pool.kv(1).space) == (0, "full", 4, "window")
    assert isinstance(pool.latent(2), LatentView) and isinstance(pool.index(2), IndexView)
    assert isinstance(pool.state(3), StateView)
    assert pool.state(3).conv["x"].shape == (3, 2, 6, 3) and pool.state(3).state.shape == (3, 2, 4, 6)
    assert pool.windows == {"full": 0, "window": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_pools_take_the_bytes_that_were_planned_under_every_split(family: str, tmp_path: Path) -> None:
    config = read_config(make_family(tmp_path / family, family))
    parts = components(config, CacheFormat("bfloat16"))
    for tp, pp, cp in itertools.product((1, 2, 4), repeat=3):
        split = Split(tp=tp, pp=pp, cp=cp)
        try:
            check_split(config, split)
        except ConfigError:
            continue
        split = staged(split, config.num_layers)
        for rank in {0, split.world_size - 1}:
            ctx = context(split, rank)
            pool = DevicePool(parts, num_layers=config.num_layers, sizes=SIZES, page_size=8, ctx=ctx)
            where = {"num_layers": config.num_layers, "page_size": 8, "split": split, "at": ctx.coords}
            planned = sum(SIZES[part.space] * unit_bytes(part, **where) for part in parts)  # type: ignore[arg-type]
            memory = {rows.untyped_storage().data_ptr(): rows.untyped_storage().nbytes() for rows in tensors(pool)}
            assert sum(memory.values()) == planned, "views of one component's layers share their memory"


def tensors(pool: DevicePool) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for view in pool._views.values():
        match view:
            case KVView():
                found += [view.k, view.v]
            case LatentView():
                found += [view._latent, view._rope, *([] if view._scale is None else [view._scale])]
            case IndexView():
                found.append(view.key)
            case StateView():
                found += [view.state, *view.conv.values()]
    return found


def test_cp_divides_tokens_tp_divides_heads_and_both_divide_states() -> None:
    keys = kv("kv", [0], heads=4, dim=8, fmt=FLOAT32)
    latents = latent([0], rank=16, rope_dim=4, fmt=FLOAT32)
    states = recurrent([0], heads=8, key_dim=4, value_dim=4, fmt=FLOAT32)

    def size(part: Component, split: Split) -> int:
        return unit_bytes(part, num_layers=1, page_size=8, split=split, at=split.coords(0))

    whole = {part.name: size(part, Split()) for part in (keys, latents, states)}
    assert whole == {"kv": 8 * 2 * 4 * 8 * 4, "latent": 8 * 20 * 4, "state": 8 * 16 * 4}
    assert size(keys, Split(tp=2, cp=4)) == whole["kv"] // 8
    assert size(keys, Split(tp=8)) == whole["kv"] // 4, "a KV head is not divided"
    assert size(latents, Split(tp=2, cp=4)) == whole["latent"] // 4
    assert size(states, Split(tp=2, cp=4)) == whole["state"] // 8


def test_an_fp8_latent_takes_656_bytes_and_comes_back_nearly_the_same() -> None:
    part = latent([0], rank=512, rope_dim=64, fmt=CacheFormat("bfloat16", has_fp8_latent=True))
    assert sum(field.num_bytes for field in part.fields) == 512 + 16 + 128
    assert sum(f.num_bytes for f in latent([0], rank=512, rope_dim=64, fmt=CacheFormat("bfloat16")).fields) == 1152
    view = pool_of(part).latent(0)
    random = torch.Generator().manual_seed(0)
    # From tiny to large: every block of 128 has a scale of its own.
    rows = torch.randn(3, 512, generator=random) * torch.logspace(-6, 4, 4).repeat_interleave(128)
    rope = torch.randn(3, 64, generator=random)
    view.write(torch.tensor([9, 2, 30]), rows, rope)
    back, back_rope = view.read([(9, 1), (2, 1), (30, 1)], dtype=torch.float32)
    blocks = rows.unflatten(1, (4, 128))
    error = (back.unflatten(1, (4, 128)) - blocks).abs() / blocks.abs().amax(-1, keepdim=True)
    assert error.max() < 2**-4  # of the largest number of the block: 3 bits behind the point
    torch.testing.assert_close(back_rope, rope, atol=0, rtol=2**-8)


def test_fp8_is_refused_for_a_rank_that_blocks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="multiple of 128, this model has 32"):
        latent([0], rank=32, rope_dim=8, fmt=CacheFormat("bfloat16", has_fp8_latent=True))
