"""The families of chat models whose calls and reasoning are known.

Facts about texts only; they come from the families' chat templates and are checked by tests/unit/test_chat_formats.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raycache.api.formats.calls import IdStyle
from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.json_calls import JsonCalls
from raycache.api.formats.literal_calls import GemmaCalls, PythonCalls
from raycache.api.formats.named_calls import NamedCalls
from raycache.api.formats.parser import ReasoningMarks
from raycache.api.formats.xml_calls import XmlCalls

REASONING = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
)
"""What templates and vocabularies are searched for, where a family's marks are not part of its format."""


@dataclass(frozen=True)
class Family:
    """One way to write calls, and how a template of it is recognised.

    Attributes:
        format: its reasoning marks are added when a template is recognised, unless they are given.
        needs: texts that are all in the template, or, if they are special tokens, in the vocabulary.
    """

    format: ChatFormat
    needs: tuple[str, ...]


_DSML = XmlCalls(
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    call=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    parameter=('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    quote='"',
    types="string",
)
_LLAMA = JsonCalls("", arguments="parameters", also_opens=("<|python_tag|>",), separator="; ")
_SECTION_V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_THINK = ReasoningMarks("<think>", "</think>", is_ended_by_calls=True)

# In this order: the first that fits is taken, so special marks come before those that several families share.
FAMILIES = (
    Family(ChatFormat("harmony", has_channels=True), ("<|channel|>", "<|message|>")),
    Family(
        ChatFormat("gemma-4", ReasoningMarks("<|channel>thought\n", "<channel|>"), GemmaCalls()),
        ("<|tool_call>", "<tool_call|>"),
    ),
    Family(
        ChatFormat(
            "kimi-k3",
            ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            XmlCalls(
                section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
                call=('<|open|>call tool="', '"<|sep|>', "<|close|>call<|sep|>"),
                parameter=('<|open|>argument key="', '"<|sep|>', "<|close|>argument<|sep|>"),
                pad="",
                quote='"',
                types="type",
            ),
            frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
        ("<|open|>", "<|sep|>"),
    ),
    Family(
        ChatFormat(
            "kimi-k2",
            _THINK,
            NamedCalls(
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                open="<|tool_call_begin|>",
                middle="<|tool_call_argument_begin|>",
                close="<|tool_call_end|>",
                is_numbered=True,
            ),
            IdStyle.KIMI,
        ),
        ("<|tool_calls_section_begin|>",),
    ),
    # Its calls are nested elements, which are not read.
    Family(ChatFormat("minimax-m3", ReasoningMarks("<mm:think>", "</mm:think>")), ("]<]minimax[>[",)),
    Family(
        ChatFormat(
            "minimax-m2",
            calls=XmlCalls(
                section=("<minimax:tool_call>", "</minimax:tool_call>"),
                call=('<invoke name="', '">', "</invoke>"),
                parameter=('<parameter name="', '">', "</parameter>"),
                quote='"',
            ),
        ),
        ("<minimax:tool_call>",),
    ),
    Family(
        ChatFormat("deepseek-v4", calls=replace(_DSML, section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))),
        ("<｜DSML｜tool_calls>",),
    ),
    Family(ChatFormat("deepseek-v3.2", calls=_DSML), ("<｜DSML｜function_calls>",)),
    Family(
        ChatFormat(
            "deepseek-v3",
            _THINK,
            NamedCalls(
                section=_SECTION_V3,
                open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                middle="```json",
                close="```<｜tool▁call▁end｜>",
                line="\n",
            ),
        ),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    Family(
        ChatFormat(
            "deepseek-v3.1",
            _THINK,
            NamedCalls(
                section=_SECTION_V3,
                open="<｜tool▁call▁begin｜>",
                middle="<｜tool▁sep｜>",
                close="<｜tool▁call▁end｜>",
            ),
        ),
        ("<｜tool▁calls▁begin｜>",),
    ),
    Family(
        ChatFormat(
            "glm-4.5",
            calls=XmlCalls(
                call=("<tool_call>", "", "</tool_call>"),
                parameter=("<arg_key>", "</arg_key>", "</arg_value>"),
                value="<arg_value>",
            ),
        ),
        ("<arg_key>", "<tool_call>"),
    ),
    Family(
        ChatFormat(
            "seed-oss",
            ReasoningMarks("<seed:think>", "</seed:think>"),
            XmlCalls(
                section=("<seed:tool_call>", "</seed:tool_call>"),
                call=("<function=", ">", "</function>"),
                parameter=("<parameter=", ">", "</parameter>"),
                value_pad="",
            ),
        ),
        ("<seed:tool_call>", "<function="),
    ),
    Family(
        ChatFormat(
            "qwen3-coder",
            calls=XmlCalls(
                section=("<tool_call>", "</tool_call>"),
                call=("<function=", ">", "</function>"),
                parameter=("<parameter=", ">", "</parameter>"),
                value_pad="\n",
            ),
        ),
        ("<function=", "<parameter="),
    ),
    Family(
        ChatFormat("nemotron-v2", calls=JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True)),
        ("<TOOLCALL>",),
    ),
    Family(
        ChatFormat(
            "mistral-v11",
            calls=NamedCalls(open="[TOOL_CALLS]", middle="[ARGS]", id_mark="[CALL_ID]"),
            ids=IdStyle.MISTRAL,
        ),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    Family(
        ChatFormat("mistral", calls=JsonCalls("[TOOL_CALLS]", is_list=True), ids=IdStyle.MISTRAL),
        ("[TOOL_CALLS]",),
    ),
    Family(
        ChatFormat("granite-3", calls=JsonCalls("<|tool_call|>", is_list=True, also_opens=("<tool_call>",))),
        ("<|tool_call|>",),
    ),
    Family(
        ChatFormat("minimax-m1", calls=JsonCalls("<tool_calls>", "</tool_calls>", separator="\n")),
        ("<tool_calls>", "</tool_calls>"),
    ),
    Family(
        ChatFormat("lfm2", calls=PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")),
        ("<|tool_call_start|>",),
    ),
    Family(ChatFormat("hermes", calls=JsonCalls("<tool_call>", "</tool_call>")), ("<tool_call>", "</tool_call>")),
    Family(ChatFormat("llama-3", calls=_LLAMA), ('"parameters"', "ipython")),
    Family(
        ChatFormat("pythonic", calls=PythonCalls("", "<|python_end|>", also_opens=("<|python_start|>",))),
        ("[func_name1(",),
    ),
)
