"""Fields of other servers, accepted with the value that asks for nothing.

Clients written for vLLM, SGLang or llama.cpp often send every field of that server, most of them at its default. Any
other value of these fields is refused like an unknown field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_prompt": (True,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "repeat_penalty": (1.0,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "typical_p": (1.0,),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Field -> values without effect. Null is one for every field."""


def is_neutral(name: str, value: object) -> bool:
    """Whether a field that no schema knows asks for nothing."""
    return any(
        value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )
