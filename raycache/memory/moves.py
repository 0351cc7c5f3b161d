"""Moves of whole units between the device and the host, as plans name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Unit(NamedTuple):
    """A page or a state slot on its way.

    Attributes:
        space: component space.
        device, host: its ids there.
        tag: the first 8 bytes of the digest of the tokens up to its end, little endian; says on load that the host's
            slot still holds what the decider thinks.
    """

    space: str
    device: int
    host: int
    tag: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Units that move together.

    Attributes:
        number: on its lane, without gaps from 1 within an epoch.
        units: in any order.
    """

    number: int
    units: Sequence[Unit]
