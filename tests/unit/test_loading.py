"""A rank's weights are read ahead: what is planned is what is read, and numbers are those of the files."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raycache.checkpoint import file_reads
from raycache.checkpoint.file_reads import OpenFile, Part
from raycache.checkpoint.read_ahead import Read, ReadAhead
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.deployment.stages import with_stages
from raycache.errors import CheckpointError
from raycache.models.base import Model, load_model, read_config
from raycache.models.drafts.loading import read_models
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.rank.loading import load_weights
from tests.oracle.draft_models import make_predicting
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.tiny import make_tiny
from tests.unit.test_quantised import CASES, make_case

CPU = torch.device("cpu")


def rank_of(config: Config, rank: int) -> ParallelContext:
    """One whose groups only know their size."""
    split = with_stages(config, read_config(Path(config.model))).split
    at = split.coords(rank)
    groups = {axis: Group(rank=getattr(at, axis), size=getattr(split, axis)) for axis in ("tp", "pp", "cp")}
    return ParallelContext(split, rank, CPU, **groups)


def tensors(thing: object, found: list[torch.Tensor], seen: set[int]) -> list[torch.Tensor]:
    """All of an object's, in the order of its attributes."""
    if isinstance(thing, torch.Tensor):
        return [*found, thing]
    if id(thing) in seen or isinstance(thing, Group | str | int | type(None)):
        return found
    seen.add(id(thing))
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else None
    for each in inner if inner is not None else vars(thing).values() if getattr(thing, "__dict__", None) else ():
        found = tensors(each, found, seen)
    return found


class Watched:
    """Which reads were done, and which of them nobody had planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone: list[Read] = []
        self.bytes = Counter[int]()
        self.told: list[tuple[int, int]] = []
        self.taken: list[torch.Tensor] = []
        now, read, take = Read.now, OpenFile.read, ReadAhead.take

        def alone(one: Read) -> torch.Tensor:
            if one.num_bytes:
                self.alone.append(one)
            return now(one)

        def counted(file: OpenFile, part: Part, *args: object, **kwargs: object) -> None:
            self.bytes[part.offset] += part.num_bytes
            read(file, part, *args, **kwargs)  # type: ignore[arg-type]

        def kept(ahead: ReadAhead, one: Read) -> torch.Tensor:
            self.taken.append(take(ahead, one))
            return self.taken[-1]

        monkeypatch.setattr(ReadAhead, "take", kept)
        monkeypatch.setattr(Read, "now", alone)
        monkeypatch.setattr(OpenFile, "read", counted)

    def load(self, config: Config, ctx: ParallelContext) -> Model:
        model = read_models(Path(config.model), config.draft if config.has_draft_model else "none")
        loaded, draft = load_weights(
            Deployment(config, model, "cpu"),
            ctx,
            num_threads=3,
            on_progress=lambda done, total: self.told.append((done, total)),
        )
        assert (draft is None) == (model.draft is None or not ctx.is_last_stage)
        return loaded


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_was_planned_and_nothing_twice(tmp_path: Path, family: str, watched: Watched) -> None:
    config = Config(model=str(make_family(tmp_path / family, family)), tp=2, pp=2)
    for rank in (1, 2):
        ctx = rank_of(config, rank)
        loaded = watched.load(config, ctx)
        total = watched.told[-1][1]
        assert watched.told[-1] == (total, total) and total == sum(watched.bytes.values()) > 0
        assert watched.alone == []
        watched.bytes.clear()
        source = Checkpoint(Path(config.model))
        plain = load_model(
            read_config(Path(config.model)), source, ctx, torch.float32, on_progress=lambda done, total: None
        )
        found, wanted = tensors(loaded, [], set()), tensors(plain, [], set())
        assert len(found) == len(wanted) > 5
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        watched.alone.clear()
        watched.bytes.clear()


@pytest.mark.parametrize("name", CASES)
def test_of_quantised_weights_only_scales_are_read_by_themselves(tmp_path: Path, name: str, watched: Watched) -> None:
    quantised, _ = make_case(tmp_path, name)
    config = Config(model=str(quantised), tp=2)
    for rank in range(2):
        watched.load(config, rank_of(config, rank))
        total = watched.told[-1][1]
        assert watched.told[-1] == (total, total) and total > sum(read.num_bytes for read in watched.alone)
        offsets = {watched_read.offset for watched_read in watched.alone}
        scales = {
            stored.offset
            for each, stored in ((each, Checkpoint(quantised).entry(each)) for each in Checkpoint(quantised).names())
            if "scale" in each
        }
        assert offsets <= scales
        watched.alone.clear()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_draft_counts_as_what_is_to_be_read(tmp_path: Path, family: str, watched: Watched) -> None:
    model_dir = make_predicting(tmp_path / "target", family)
    alone = Config(model=str(model_dir))
    watched.load(alone, rank_of(alone, 0))
    without = watched.told[-1][1]
    watched.told.clear()
    watched.load(Config(model=str(model_dir), draft="mtp"), rank_of(alone, 0))
    done, total = watched.told[-1]
    assert done == total > without and watched.alone == []
    assert watched.told == sorted(watched.told), "numbers on the board only grow"


def test_a_checkpoint_in_the_type_of_the_activations_is_not_copied(tmp_path: Path, watched: Watched) -> None:
    """Matrices that are used as they are stored are the tensors that were read."""
    model_dir = make_tiny(tmp_path)
    config = Config(model=str(model_dir))
    found = tensors(watched.load(config, rank_of(config, 0)), [], set())
    stored = load_file(model_dir / "model.safetensors")
    embedding = next(one for one in found if one.shape == stored["model.embed_tokens.weight"].shape)
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert embedding.data_ptr() in {one.data_ptr() for one in watched.taken}


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny(tmp_path)
    config = Config(model=str(model_dir))
    ctx, opened = rank_of(config, 0), OpenFile.__init__

    def cut_short(file: OpenFile, path: Path) -> None:
        opened(file, path)
        with path.open("r+b") as handle:
            handle.truncate(path.stat().st_size // 2)

    monkeypatch.setattr(OpenFile, "__init__", cut_short)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(it ends too early\)"):
        watched.load(config, ctx)


def test_the_log_says_how_much_was_read(
    tmp_path: Path, watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reads, "PART_BYTES", 4096)
    config = Config(model=str(make_tiny(tmp_path)))
    with caplog.at_level(logging.INFO):
        watched.load(config, rank_of(config, 0))
    (line,) = [record.getMessage() for record in caplog.records if "of weights in" in record.getMessage()]
    assert line.startswith("read ")
