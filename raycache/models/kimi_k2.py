"""Kimi K2, which has the architecture of DeepSeek-V3 (arXiv 2507.20534)."""

from __future__ import annotations

from raycache.models.deepseek_v3 import DeepseekV3


class KimiK2(DeepseekV3):
    """The layers of DeepSeek-V3."""

    model_type = "kimi_k2"
