"""What a host tier is made for, derived from settings and model, and kept on disk by its owner."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from raycache.cache.catalog import Catalog
from raycache.deployment.deployment import Deployment
from raycache.host.directory import SPEC
from raycache.memory.component import Component, Reuse, RowField
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.sharding import Split


@dataclass(frozen=True)
class HostSpec:
    """What a host tier is made for, and which storage it has.

    Attributes:
        components: the model's components, in the device's format.
        num_layers: layers of the whole model.
        page_size: tokens per page.
        split: how the model is split over ranks.
        sizes: component space -> number of host units.
        catalog_bytes: size of the arena's catalog.
        storage: URL; "": none.
        storage_timeout_s: timeout of a call across a network.
        storage_bytes: size limit set by an operator; 0: that of the URL.
        nodes: index of each rank's node; empty if all ranks are on one node.
        node: index of this host tier's node; None if all ranks are on one node.
    """

    components: tuple[Component, ...]
    num_layers: int
    page_size: int
    split: Split
    sizes: Mapping[str, int]
    catalog_bytes: int
    storage: str = ""
    storage_timeout_s: float = 2.0
    storage_bytes: int = 0
    nodes: tuple[int, ...] = ()
    node: int | None = None

    @property
    def layout(self) -> EnvelopeLayout:
        """Envelopes of the node's ranks."""
        return EnvelopeLayout(
            self.components,
            num_layers=self.num_layers,
            page_size=self.page_size,
            split=self.split,
            nodes=self.nodes,
            node=self.node,
        )

    @property
    def own_storage(self) -> str:
        """URL of the storage with {node} replaced by the node's index, so that nodes can share a directory."""
        return self.storage.replace("{node}", str(self.node or 0))

    def suits(self, other: HostSpec) -> bool:
        """Whether an arena made for `other` can be used, whatever its size."""
        return replace(self, **_CHANGEABLE) == replace(other, **_CHANGEABLE)

    def packed(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), default=_plain).encode()

    @classmethod
    def read(cls, data: bytes) -> HostSpec:
        """Inverse of `packed`.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        values = json.loads(data)
        parts = tuple(_component(part) for part in values.pop("components"))
        sizes = values.pop("split")
        split = Split(**{**sizes, "stages": tuple(sizes["stages"])})
        return cls(components=parts, split=split, nodes=tuple(values.pop("nodes")), **values)


_CHANGEABLE: dict[str, Any] = {
    "sizes": {},
    "catalog_bytes": 0,
    "storage": "",
    "storage_timeout_s": 0.0,
    "storage_bytes": 0,
}


class SpecFile:
    """The spec of a host tier on disk, for the next owner.

    Args:
        directory: of the host tier.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / SPEC

    def keep(self, spec: HostSpec) -> HostSpec:
        """Write a spec atomically; returns it."""
        fresh = self._path.with_name("spec.new")
        # Readable by the owner only: a URL can contain a password.
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(spec.packed())
        fresh.replace(self._path)
        return spec

    def read(self) -> HostSpec:
        """The spec that was kept.

        Raises:
            FileNotFoundError: no spec was kept.
            ValueError, TypeError, KeyError: `data` is not a packed spec.
        """
        return HostSpec.read(self._path.read_bytes())

    def remove(self) -> None:
        """Delete the spec."""
        self._path.unlink(missing_ok=True)


def host_spec(
    deployment: Deployment, *, sizes: Mapping[str, int], nodes: Sequence[int] = (), node: int | None = None
) -> HostSpec:
    """Make the spec of a deployment's host tier.

    Args:
        deployment: with a host tier.
        sizes: component space -> units.
        nodes: index of each rank's node; empty if all are on one.
        node: index of the host tier's node; None if all ranks are on one. The first one holds the catalog.
    """
    config = deployment.config
    catalog_bytes = Catalog.num_bytes(sizes=sizes, page_size=config.page_size, part_widths=deployment.part_widths)
    return HostSpec(
        components=deployment.components,
        num_layers=deployment.model.num_layers,
        page_size=config.page_size,
        split=config.split,
        sizes=sizes,
        catalog_bytes=0 if node else catalog_bytes,
        storage=config.storage if config.has_storage else "",
        storage_timeout_s=config.prefetch_timeout_s,
        nodes=tuple(nodes),
        node=node,
    )


def _plain(value: object) -> object:
    assert isinstance(value, Enum)
    return value.value


def _component(values: dict[str, Any]) -> Component:
    fields = tuple(RowField(**{**field, "shape": tuple(field["shape"])}) for field in values["fields"])
    return Component(**{**values, "layers": tuple(values["layers"]), "fields": fields, "reuse": Reuse(values["reuse"])})
