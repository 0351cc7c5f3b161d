"""Who is told of each change of a prefix tree."""

from __future__ import annotations

from typing import Protocol

from raycache.cache.node import Node
from raycache.memory.pages import PageIds


class TreeListener(Protocol):
    """Told of changes as they happen; must not change the tree."""

    def added(self, node: Node, num_pages: int) -> None:
        """Pages were added, the last ones of the path from the root to the end of a node."""
        ...

    def dropped(self, pages: PageIds) -> None:
        """The last pages of a leaf leave the tree; its restore point is gone already."""
        ...

    def point_added(self, node: Node) -> None:
        """A restore point now stands at the end of a node."""
        ...

    def point_dropped(self, node: Node) -> None:
        """The restore point at the end of a node is gone."""
        ...


class NoListener:
    """Stands in where nobody listens."""

    def added(self, node: Node, num_pages: int) -> None:
        """Do nothing."""

    def dropped(self, pages: PageIds) -> None:
        """Do nothing."""

    def point_added(self, node: Node) -> None:
        """Do nothing."""

    def point_dropped(self, node: Node) -> None:
        """Do nothing."""
