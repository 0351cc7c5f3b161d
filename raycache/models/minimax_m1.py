"""MiniMax-M1 as published."""

from __future__ import annotations

from raycache.models.minimax_text_01 import MiniMaxText01


class MiniMaxM1(MiniMaxText01):
    """See models.base.Family."""

    model_type = "minimax_m1"
