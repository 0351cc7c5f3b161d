"""Keys, storage files and the host tier's catalog, byte for byte as in earlier versions.

And plans on the wire, which may change, since a gang runs one version: then by intent.
"""

from __future__ import annotations

import struct
from array import array
from hashlib import sha256
from pathlib import Path

import numpy as np

from raycache.cache.catalog import Catalog
from raycache.cache.keys import Identity, PageChain, object_keys, row_format, tag_of
from raycache.host.spec import HostSpec
from raycache.memory.box import Box
from raycache.memory.component import CacheFormat, Component, index_keys, kv, latent, recurrent
from raycache.memory.moves import Moves, Unit
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.sharding import Split
from raycache.storage.base import HEADER_BYTES, pack_object
from raycache.storage.file import FileStorage
from raycache.types import SamplingParams
from raycache.wire.plan import UNKNOWN, Admit, Row, Rows, StepPlan

FMT = CacheFormat("bfloat16")
COMPONENTS = (
    kv("full", (0, 3), heads=4, dim=16, fmt=FMT),
    kv("window", (1,), heads=4, dim=16, fmt=FMT, window=20),
    latent((4, 5), rank=128, rope_dim=16, fmt=CacheFormat("bfloat16", has_fp8_latent=True)),
    index_keys((4,), dim=32, fmt=FMT),
    recurrent((2,), heads=8, key_dim=16, value_dim=16, fmt=FMT, conv=(("x", 8, 16),), conv_kernel=4),
)
TOKENS = array("i", range(7, 7 + 80)).tobytes()
IDENTITY = Identity(weights="weights", page_size=16, adapter="adapter", salt="tenant")


def digest(data: bytes | bytearray | memoryview) -> str:
    return sha256(data).hexdigest()[:16]


def page_digests() -> list[bytes]:
    return PageChain(IDENTITY).digests(TOKENS)


def keys_of(component: Component) -> list[bytes]:
    return object_keys(page_digests(), rows=row_format(component), box=Box(0, 1, 0, 16, 0, 4))


def test_digests_of_pages() -> None:
    assert digest(IDENTITY.seed()) == "c61b766277191379"
    assert digest(b"".join(page_digests())) == "a551b0cdcf7f12c4"
    assert tag_of(page_digests()[0]) == 12401402958499959015


def test_keys_of_objects() -> None:
    assert [digest(b"".join(keys_of(component))) for component in COMPONENTS] == [
        "744d0228e62f63c6",
        "9093957b1f984320",
        "99896eeaf55162cb",
        "35c99e3814cccb79",
        "f1de8718ec2f4735",
    ]


def test_objects_and_segments_in_storage(tmp_path: Path) -> None:
    key, payload = keys_of(COMPONENTS[0])[0], bytes(range(256)) * 40
    packed = bytearray(HEADER_BYTES + len(payload))
    pack_object(key, memoryview(payload), into=memoryview(packed))
    assert digest(packed) == "9b295d8508476f31"

    storage = FileStorage(tmp_path / "storage", max_bytes=4 << 20)
    assert storage.put([key], payloads=[payload]) == [True]
    storage.close()
    files = sorted(path for path in (tmp_path / "storage").rglob("*") if path.is_file())
    assert [(path.name, digest(path.read_bytes())) for path in files] == [
        ("00000001.segment", "9e5a8fb757478fac"),
        ("raycache-storage", "8796b146d0a0bd41"),
    ]


def test_the_arena_and_its_description() -> None:
    split = Split(tp=2, cp=2, pp=2, stages=(3, 3))
    layout = EnvelopeLayout(COMPONENTS, num_layers=6, page_size=16, split=split)
    spaces = ("full", "window", "state")
    places = [(r, s, layout.envelope_bytes(r, s), layout.pieces(r, s)) for r in range(8) for s in spaces]
    assert digest(repr(places).encode()) == "955a49dbeb171ba1"
    spec = HostSpec(
        COMPONENTS,
        num_layers=6,
        page_size=16,
        split=split,
        sizes={"full": 64, "window": 16, "state": 8},
        catalog_bytes=4096,
        storage="file:///cache",
        nodes=(0, 0, 0, 0, 1, 1, 1, 1),
        node=1,
    )
    assert digest(spec.packed()) == "833f6bac309c6c48"
    assert HostSpec.read(spec.packed()) == spec


def test_the_catalog() -> None:
    facts = {"sizes": {"full": 8, "window": 8, "state": 4}, "page_size": 16}
    widths = {"window": 3, "state": 1}
    memory = bytearray(Catalog.num_bytes(**facts, part_widths=widths))  # type: ignore[arg-type]
    catalog = Catalog(memoryview(memory), **facts, part_widths=widths)  # type: ignore[arg-type]
    ids = np.array([4, 2, 7, 1, 0])
    catalog.add_pages(ids, digests=b"".join(page_digests()), tokens=TOKENS, parent=-1, seed=IDENTITY.seed())
    catalog.add_point(7, {"window": (3, 1), "state": (2,)})
    assert digest(memory) == "197dff98a5462224"


def test_plans_on_the_wire() -> None:
    plan = StepPlan(
        step=9,
        rows=[
            Row(
                slot=1, start=16, tokens=TOKENS[:40], new_pages={"full": [4, 5], "window": [-1, 2]}, targets=TOKENS[4:8]
            ),
            Row(
                slot=0,
                start=3,
                tokens=TOKENS[:12],
                output_position=2,
                read_state=1,
                write_state=2,
                num_drafts=2,
                draft_states=(3, 4),
                accepted=TOKENS[:4],
                num_next_drafts=3,
            ),
            Row(slot=2, start=5, tokens=struct.pack("<i", -1), is_fed=True, next_token=12),
        ],
        admits=[
            Admit(slot=1, pages={"full": [1]}, sampling=SamplingParams(temperature=0.5), seed=3, prompt=TOKENS[:8])
        ],
        num_top=2,
        saves=[Moves.of(1, [Unit("full", 1, 2, 3)])],
        loads=[Moves.of(4, [Unit("state", 0, 1, 2**63)])],
        is_saved_first=True,
    )
    assert digest(plan.pack()) == "39194942b61e94a4"
    rows = Rows(plan.rows)
    rows.tokens += [(4, 90, TOKENS[:4], 7), (5, 2**33, UNKNOWN, 0)]
    assert digest(StepPlan(10, rows).pack()) == "085318b79388cc91"
