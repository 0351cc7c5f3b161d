"""What chat models of each family write: two calls at once, one with nested arguments and one without any.

The texts are those that the families' chat templates give for `CALLS` in an earlier turn, without the mark that ends
the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "opts": {
                "type": "object",
                "properties": {
                    "units": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = {"city": "Zürich", "days": 3, "opts": {"units": "C", "tags": ["a", "b"]}}
CALLS = [("get_weather", WEATHER), ("now", {})]
JSON = '{"city": "Zürich", "days": 3, "opts": {"units": "C", "tags": ["a", "b"]}}'
CONTENT, THOUGHTS = "Let me look.", "I need weather."


@dataclass(frozen=True)
class Output:
    """One output.

    Attributes:
        family: name of the format.
        prompt_tail: end of the rendered prompt.
        reasoning, content: in it.
        calls: in it.
        ids: that the family's text gives, if any.
    """

    family: str
    text: str
    prompt_tail: str = ""
    reasoning: str = ""
    content: str = CONTENT
    calls: tuple[tuple[str, Any], ...] = tuple(CALLS)
    ids: tuple[str, ...] = ()


_WEATHER = f'{{"name": "get_weather", "arguments": {JSON}}}'
_NOW = '{"name": "now", "arguments": {}}'
_HERMES = f"<tool_call>\n{_WEATHER}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>"
_OPTS = '{"units": "C", "tags": ["a", "b"]}'
_QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    f"<parameter=opts>\n{_OPTS}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
_SEED = _QWEN.replace("tool_call>", "seed:tool_call>").replace("\n</parameter>", "</parameter>")
_SEED = _SEED.replace("=city>\n", "=city>").replace("=days>\n", "=days>").replace("=opts>\n", "=opts>")
_MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
    f'<parameter name="days">3</parameter>\n<parameter name="opts">{_OPTS}</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
_DSML = (
    '<｜DSML｜SECTION>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="opts" string="false">{_OPTS}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜SECTION>'
)
_GLM_ARGUMENTS = (
    "<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    f"<arg_key>opts</arg_key>\n<arg_value>{_OPTS}</arg_value>\n"
)
_GLM = f"<tool_call>get_weather\n{_GLM_ARGUMENTS}</tool_call>\n<tool_call>now\n</tool_call>"
_LING_ARGUMENTS = _GLM_ARGUMENTS.replace("</arg_value>\n", "</arg_value>")
_LING = f"<tool_call>get_weather\n{_LING_ARGUMENTS}\n</tool_call>\n<tool_call>now\n\n</tool_call>"
_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_K2 = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:4<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:5<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
_K3_ARGUMENTS = (
    '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    f'<|open|>argument key="opts" type="object"<|sep|>{_OPTS}<|close|>argument<|sep|>'
)
_K3 = (
    f'<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>{_K3_ARGUMENTS}<|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
)
_LLAMA = f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}'
_PYTHON = f'[get_weather(city="Zürich", days=3, opts={_OPTS}), now()]'
_GEMMA = (
    '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3,opts:{tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
    'units:<|"|>C<|"|>}}<tool_call|><|tool_call>call:now{}<tool_call|>'
)
_HARMONY = (
    f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>commentary<|message|>{CONTENT}<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{JSON}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)

OUTPUTS = {
    "hermes": Output("hermes", _HERMES, content=""),
    "hermes, content": Output("hermes", f"{CONTENT}\n{_HERMES}"),
    "hermes, thoughts": Output(
        "hermes", f"<think>\n{THOUGHTS}\n</think>\n\n{CONTENT}\n{_HERMES}", "<|im_start|>assistant\n", THOUGHTS
    ),
    "hermes, thoughts opened": Output(
        "hermes", f"{THOUGHTS}\n</think>\n\n{_HERMES}", "<|im_start|>assistant\n<think>\n", THOUGHTS, content=""
    ),
    "hermes, thoughts closed": Output(
        "hermes", f"{CONTENT}\n{_HERMES}", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "qwen3-coder": Output("qwen3-coder", f"{CONTENT}\n\n{_QWEN}"),
    "qwen3.5, thoughts": Output(
        "qwen3-coder", f"{THOUGHTS}\n</think>\n\n{CONTENT}\n\n{_QWEN}", "assistant\n<think>\n", THOUGHTS
    ),
    "qwen3-coder without the outer mark": Output("qwen3-coder", _QWEN.removeprefix("<tool_call>\n"), content=""),
    "seed-oss": Output("seed-oss", f"<seed:think>{THOUGHTS}</seed:think>{CONTENT}\n{_SEED}", reasoning=THOUGHTS),
    "minimax-m2": Output("minimax-m2", f"{THOUGHTS}\n</think>\n\n{CONTENT}\n{_MINIMAX}", "]~b]ai\n<think>\n", THOUGHTS),
    "deepseek-v3.2": Output("deepseek-v3.2", f"{CONTENT}\n\n{_DSML.replace('SECTION', 'function_calls')}", "</think>"),
    "deepseek-v4": Output(
        "deepseek-v4",
        f"{THOUGHTS}</think>{CONTENT}\n\n"
        + _DSML.replace("SECTION", "tool_calls").replace('name="now">\n', 'name="now">\n\n'),
        "<｜Assistant｜><think>",
        THOUGHTS,
    ),
    "deepseek-v3": Output("deepseek-v3", f"{CONTENT}{_V3}", "<｜Assistant｜>"),
    "deepseek-r1": Output(
        "deepseek-v3", f"{THOUGHTS}\n</think>\n\n{CONTENT}{_V3}", "<｜Assistant｜><think>\n", THOUGHTS
    ),
    "deepseek-v3.1": Output("deepseek-v3.1", f"{CONTENT}{_V31}", "<｜Assistant｜></think>"),
    "deepseek-v3.1, thoughts": Output(
        "deepseek-v3.1", f"{THOUGHTS}</think>{CONTENT}{_V31}", "<｜Assistant｜><think>", THOUGHTS
    ),
    "deepseek-v3.1, thoughts not closed": Output(
        "deepseek-v3.1", f"{THOUGHTS}{_V31}", "<｜Assistant｜><think>", THOUGHTS, content=""
    ),
    "glm-4.5": Output("glm-4.5", f"\n<think>{THOUGHTS}</think>\n{CONTENT}\n{_GLM}", "<|assistant|>", THOUGHTS),
    "glm-4.7": Output(
        "glm-4.5", f"{THOUGHTS}</think>{CONTENT}{_GLM}".replace("\n", ""), "<|assistant|><think>", THOUGHTS
    ),
    "ling-3": Output("glm-4.5", f"{CONTENT}\n{_LING}", "<role>ASSISTANT</role>\n<think></think>"),
    "kimi-k2": Output(
        "kimi-k2",
        f"<think>{THOUGHTS}</think>{CONTENT}{_K2}",
        reasoning=THOUGHTS,
        ids=("functions.get_weather:4", "functions.now:5"),
    ),
    "kimi-k3": Output(
        "kimi-k3",
        f"{THOUGHTS}<|close|>think<|sep|><|open|>response<|sep|>{CONTENT}<|close|>response<|sep|>{_K3}",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        THOUGHTS,
    ),
    "kimi-k3, response opened": Output(
        "kimi-k3", f"{CONTENT}<|close|>response<|sep|>{_K3}", "<|sep|><|open|>response<|sep|>"
    ),
    "llama-3": Output("llama-3", _LLAMA, content=""),
    "llama-3, python tag": Output("llama-3", f"<|python_tag|>{_LLAMA}", content=""),
    "pythonic": Output("pythonic", _PYTHON, content=""),
    "llama-4": Output("pythonic", f"<|python_start|>{_PYTHON}<|python_end|>", content=""),
    "lfm2": Output("lfm2", f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>{CONTENT}"),
    "mistral 7B v0.3": Output("mistral", f"[TOOL_CALLS] [{_WEATHER}, {_NOW}]", content=""),
    "mistral nemo": Output(
        "mistral",
        f'[TOOL_CALLS][{_WEATHER[:-1]}, "id": "call00000"}}, {_NOW[:-1]}, "id": "call00001"}}]',
        content="",
    ),
    "mistral small 3.2": Output(
        "mistral-v11",
        f"[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]call00001[ARGS]{{}}",
        content="",
        ids=("call00000", "call00001"),
    ),
    "devstral": Output("mistral-v11", f"{CONTENT}[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}"),
    "nemotron-v2": Output(
        "nemotron-v2",
        f"{THOUGHTS}\n</think>\n\n{CONTENT}\n<TOOLCALL>[{_WEATHER}, {_NOW}]</TOOLCALL>\n",
        "<SPECIAL_11>Assistant\n<think>\n",
        THOUGHTS,
    ),
    "granite 3.0": Output("granite-3", f"<|tool_call|> [{_WEATHER}, {_NOW}]", content=""),
    "granite 3.1": Output(
        "granite-3",
        f'<tool_call>[{{"arguments": {JSON}, "name": "get_weather"}}, {{"arguments": {{}}, "name": "now"}}]',
        content="",
    ),
    "minimax-m1": Output(
        "minimax-m1",
        f"<think>\n{THOUGHTS}\n</think>\n\n<tool_calls>\n{_WEATHER}\n{_NOW}\n</tool_calls>",
        reasoning=THOUGHTS,
        content="",
    ),
    "gemma-4": Output("gemma-4", f"<|channel>thought\n{THOUGHTS}\n<channel|>{_GEMMA}", reasoning=THOUGHTS, content=""),
    "harmony": Output("harmony", _HARMONY, "<|start|>assistant", THOUGHTS),
    "harmony, recipient first": Output(
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>",
        "<|start|>assistant",
        content="",
        calls=(CALLS[0],),
    ),
}
