"""Writes docs/reference/{settings,http,python,metrics}.md from the code.

python -m scripts.reference            write them
python -m scripts.reference --check    say which are out of date; what scripts/check runs
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import raycache
from launch.http.openapi import openapi
from raycache.api.defaults import Defaults
from raycache.api.neutral import NEUTRAL
from raycache.config import Config
from raycache.observe.aliases import ALIASES
from raycache.observe.figures import ENGINE, FRONT, Kind
from raycache.types import EngineInfo, GenerateRequest, SamplingParams

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_HEAD = "<!-- Made by `python -m scripts.reference`; do not edit. -->\n\n"
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")

_SETTINGS = """\
# Settings

Every setting is a flag of `raycache launch` and `raycache doctor`, a key of the YAML file given with `--config`, and a
keyword argument of [`LLM`](python.md). Setting `kv_memory` is the flag `--kv-memory` and the key `kv_memory`; a setting
that is true or false has the flags `--dashboard` and `--no-dashboard`. Flags override the file.

```yaml
# raycache launch --config serve.yaml --port 9000
model: models/smollm2
cp: 2
kv_memory: 1GiB
```

Settings in bold are those that most services need: `raycache launch --help` shows these, `--help-all` shows all. A SIZE
has a unit, such as `512MiB` or `4GiB`. A setting that cannot work is rejected at startup, with the values that would.
"""

_HTTP = """\
# HTTP API

The server speaks the OpenAI API for completions, chat completions and responses; any OpenAI client works with
`base_url="http://127.0.0.1:8000/v1"`. A running server describes itself at `/openapi.json`, with the limits of its
model. Unknown fields and values of the wrong type are rejected with status 400; `null` means the same as leaving the
field out. Clients of Anthropic's Messages API work with `base_url="http://127.0.0.1:8000"` ([Clients](../clients.md)).

`/v1/models` shows the model's limits and the defaults that apply to requests: `max_model_len`, `default_sampling`
([from generation_config.json](../models.md#sampling-defaults)), `default_max_tokens` (null: the rest of the context for
chats, 16 for completions) and `excess_max_tokens` (`refuse`, or `cut`: a `max_tokens` that does not fit the context is
cut to what fits). Defaults below are those of the API.

`/tokenize` takes `prompt`, or `messages` with `tools` and the other chat fields that affect the prompt, and returns
`tokens`, `count`, `max_model_len` and, with `return_token_strs`, `token_strs`. `/detokenize` takes `tokens` and returns
`prompt`.

`GET /cache/achievable` compares what the cache reused with what caches of other sizes would have reused:
[Monitoring](../monitoring.md#achieved-and-achievable). `GET /streams` lists the
[requests in progress](../monitoring.md#live-streams), `GET /history` the
[last ten minutes](../monitoring.md#history) of what `/ui` plots.

Operators have further endpoints: `/status`, [`/cache`](../tiers.md#changing-the-tiers-of-a-running-server) and
[`/replicas`](../replicas.md). Who may call what is in [Security](../security.md#keys-and-tenants).
"""
# Fields that no docstring describes, or not in the words of HTTP.
_FIELDS = {
    "max_tokens": "maximum number of tokens to generate; default: up to the context length",
    "CompletionBody.max_tokens": "maximum number of tokens to generate; default: 16, see `default_max_tokens`",
    "CompletionBody.logprobs": "alternatives to report per token; 0 reports the chosen token only",
    "ChatBody.logprobs": "report the log-probability of each token",
    "prompt_logprobs": "alternatives to report per prompt token; such a request recomputes its whole prompt",
    "seed": "the same seed gives the same tokens, whatever else is in the batch; default: a random one",
    "timeout_s": "seconds from arrival after which the request ends",
    "top_k": "sample only from this many most likely tokens; 0 or -1: from all",
    "model": "name of the model, as listed by `/v1/models`",
    "prompt": "a text, a list of texts, token ids, or a list of lists of token ids",
    "messages": "the conversation: objects with `role` and `content`, also `tool_calls` and `tool_call_id`",
    "stream": "send the output as server-sent events, as it is generated",
    "stream_options": "with `stream`: `include_usage` adds a final event with the usage; with `continuous_usage_stats` "
    "every event has the usage so far",
    "add_special_tokens": "put the tokenizer's own special tokens, such as `<s>`, around the prompt",
    "n": "choices per prompt",
    "best_of": "accepted only if equal to `n`",
    "suffix": "accepted only if empty",
    "echo": "put the prompt before the output",
    "max_completion_tokens": "the same as `max_tokens`",
    "top_logprobs": "alternatives to report per token; needs `logprobs`",
    "response_format": "`text`, `json_object`, or `json_schema` with a schema that the answer follows",
    "structured_outputs": "one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar`",
    "tools": "tools that the chat template shows to the model",
    "tool_choice": "`none`, `auto`, `required`, a tool's name, or `allowed_tools`",
    "parallel_tool_calls": "false: at most one call per answer",
    "thinking_token_budget": "maximum tokens of reasoning; then its closing marker is forced",
    "include_reasoning": "false: reasoning is generated but not shown",
    "MessagesBody.messages": "the conversation: objects with `role` and `content`, a text or a list of blocks",
    "MessagesBody.tools": "custom tools; others are ignored, with a warning in the log",
    "MessagesBody.tool_choice": "`auto`, `any`, `tool` or `none` as `type`; `disable_parallel_tool_use`",
    "MessagesBody.max_tokens": "maximum number of tokens to generate; cut to what fits the context",
    "MessagesBody.seed": "as in `/v1/chat/completions`",
    "system": "the system prompt, a text or a list of text blocks",
    "thinking": "`enabled` (with `budget_tokens`), `adaptive` or `disabled` as `type`; default: the chat template's",
    "output_config": "`effort` is passed to the chat template; `format` is a JSON schema that the answer follows",
    "output_format": "the same as `format` in `output_config`",
    "stop_sequences": "texts that end the output; they are not part of it",
    "cache_control": "keep the prompt for 5 minutes, or an hour with `ttl: 1h`; needs `eviction=priority`",
    "input": "the conversation: a text, or items such as messages, function calls and their outputs, and reasoning",
    "instructions": "a system message before the conversation",
    "max_output_tokens": "maximum number of tokens to generate; default: up to the context length",
    "ResponsesBody.tools": "functions, also in namespaces; other types are left out, with a warning in the log",
    "reasoning": "`effort` is passed to the chat template",
    "text": "`format`: `text`, `json_object`, or `json_schema` with a schema that the answer follows",
    "include": "`reasoning.encrypted_content`: the reasoning also in the form that some clients send back; "
    "`message.output_text.logprobs`: log-probabilities of the message's tokens",
    "ResponsesBody.top_logprobs": "alternatives to report per token of the message",
    "modalities": 'only `["text"]`',
    "reasoning_effort": "passed to the chat template",
    "add_generation_prompt": "passed to the chat template; default: true, unless the last message is continued",
    "continue_final_message": "continue the last message instead of beginning a new one",
    "chat_template_kwargs": "further variables for the chat template",
    "skip_special_tokens": "leave special tokens out of the text",
    "prompt_cache_key": "requests with the same key prefer the same replica unless another caches more of their prompt",
    "prompt_cache_retention": "with `--eviction priority`: `in_memory` is `cache_priority` 1 for ten minutes, `24h` "
    "for a day; otherwise, and with any other value, no effect",
    "return_token_ids": "add the token ids of prompt and output to the response",
    "cache_repairs": "apply the service's [repairs](../why.md#repairs) to this chat",
    "return_cache_info": "add `raycache` to the response: cached tokens by tier, why no more was reused, and "
    "where the prompt diverged from a recent one",
}
_INFO = EngineInfo(
    model="MODEL",
    model_dir="",
    vocab_size=2**31 - 1,
    eos_token_ids=(),
    max_model_len=2**31 - 1,
    page_size=64,
    num_pages=1,
    max_queue=2**31 - 1,
)
"""Of no particular model, so that no limit of one is shown."""

_NO_BOUND = 2**31 - 2
"""Bounds from here on only keep a number in its machine type."""

_PYTHON = """\
# Python API

What `from raycache import ...` offers. `LLM` runs the same engine as the server in your own process, without Ray:

```python
from raycache import LLM, SamplingParams

with LLM("models/smollm2") as llm:  # or a model of the Hub: "Qwen/Qwen3-8B"
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.text)
```
"""

_METRICS = """\
# Metrics

All metrics have the label `model_name`, those of engines also `replica`. [Monitoring](../monitoring.md) says where to
find them.
"""


def settings() -> str:
    """The page of settings, from the fields of Config."""
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(Config):
        known = field.metadata
        name = f"**`{field.name}`**" if known["is_common"] else f"`{field.name}`"
        row = _row(name, _values(field), _default(field.default), known["help"])
        groups.setdefault(known["group"], []).append(row)
    lines = [_SETTINGS.rstrip()]
    for group, rows in groups.items():
        lines += ["", f"## {group.capitalize()}", "", *_table("setting", "value", "default", ""), *rows]
    return _HEAD + "\n".join(lines) + "\n"


def http() -> str:
    """The page of the HTTP API, from the document that the server gives at /openapi.json."""
    document = openapi(_INFO, Defaults())
    lines = [_HTTP, "## Endpoints", "", *_table("endpoint", "")]
    for path, methods in document["paths"].items():
        lines += [_row(f"`{method.upper()} {path}`", found["summary"]) for method, found in methods.items()]
    schemas = document["components"]["schemas"]
    completion, chat = schemas["CompletionBody"]["properties"], schemas["ChatBody"]["properties"]
    chat, completion = ({name: of[name] for name in of if not _is_neutral(of, name)} for of in (chat, completion))
    shared = [name for name in chat if chat[name] == completion.get(name)]
    ignored = [name for name in shared if not chat[name]]
    for title, kind, names in (
        ("Fields of both", "ChatBody", [name for name in shared if name not in ignored]),
        ("Fields of `/v1/completions`", "CompletionBody", [name for name in completion if name not in shared]),
        ("Fields of `/v1/chat/completions`", "ChatBody", [name for name in chat if name not in shared]),
    ):
        lines += ["", f"## {title}", "", *_table("field", "type", "default", "")]
        lines += [_field(name, kind, schemas) for name in names]
    lines += ["", *_wrapped("Accepted without effect: " + ", ".join(f"`{name}`" for name in ignored) + "."), ""]
    lines += _wrapped("Fields of other servers, accepted only with the neutral value: " + _neutral() + ".")
    lines += ["", "## Fields of `/v1/messages`", "", *_table("field", "type", "default", "")]
    lines += [_field(name, "MessagesBody", schemas) for name in schemas["MessagesBody"]["properties"]]
    lines += ["", "Other fields are ignored."]
    lines += ["", "## Fields of `/v1/responses`", "", *_table("field", "type", "default", "")]
    lines += [_field(name, "ResponsesBody", schemas) for name in schemas["ResponsesBody"]["properties"]]
    lines += ["", *_wrapped("Sampling and cache fields of chat completions work too; other fields are ignored.")]
    lines += [
        "",
        "## Errors",
        "",
        'The body is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`, for `/v1/messages`',
        '`{"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}`.',
        "",
    ]
    errors = document["paths"]["/v1/completions"]["post"]["responses"]
    lines += _table("status", "")
    lines += [_row(status, found["description"]) for status, found in errors.items() if status != "200"]
    return _HEAD + "\n".join(lines) + "\n"


def _is_neutral(fields: Mapping[str, Any], name: str) -> bool:
    return name in NEUTRAL and set(fields[name]) == {"enum"}


def _neutral() -> str:
    return ", ".join(f"`{name}` {' or '.join(f'`{json.dumps(one)}`' for one in of)}" for name, of in NEUTRAL.items())


def python() -> str:
    """The page of the Python API, from the public names of the package."""
    lines = [_PYTHON]
    for name in raycache.__all__:
        thing = getattr(raycache, name)
        if not inspect.isclass(thing):
            continue
        lines += [f"## {name}", ""]
        if thing is Config:
            lines += ["All settings, as a frozen dataclass; its fields are in [Settings](settings.md).", ""]
        elif issubclass(thing, enum.Enum):
            lines += [*_prose(thing), *(f"- `{member.name}` = `{member.value!r}`" for member in thing), ""]
        elif issubclass(thing, Exception):
            tree = inspect.getdoc(sys.modules[thing.__module__]) or ""
            lines += ["All of them are in `raycache.errors`.", "", "```text", tree, "```", ""]
        else:
            lines += ["```python", _signature(name, thing), "```", "", *_prose(thing)]
        if thing is not Config:
            lines += _methods(name, thing)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def metrics() -> str:
    """The page of metrics, from the table that they are made from."""
    lines = [_METRICS.rstrip()]
    for title, kinds in (("Of engines", ENGINE), ("Of the server", FRONT)):
        lines += ["", f"## {title}", "", *_table("metric", "kind", "labels", "")]
        for metric in kinds:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(_row(f"`{metric.full_name}`", metric.kind.value, labels, metric.text.rstrip(".")))
    known = {metric.name: metric for metric in (*ENGINE, *FRONT)}
    lines += [
        "",
        "## Names of other servers",
        "",
        "On `/metrics`, and with `_` instead of `:` in Ray's metrics, with the labels `model_name` and `engine`.",
        "",
    ]
    lines += _table("name", "is")
    for alias in ALIASES:
        metric = known[alias.of]
        total = "_total" if metric.kind is Kind.COUNTER else ""
        where = "".join(f" with {name}={value}" for name, value in alias.where.items())
        lines.append(_row(f"`{alias.name}{total}`", f"`{metric.full_name}`{where}"))
    return _HEAD + "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "http.md": http,
    "python.md": python,
    "metrics.md": metrics,
}


def _field(name: str, kind: str, schemas: Mapping[str, Any]) -> str:
    """A row of a table of fields.

    Raises:
        KeyError: nothing describes the field; add it to _FIELDS.
    """
    written = _attributes(GenerateRequest) | _attributes(SamplingParams) | _FIELDS
    body = schemas[kind]
    shown, default = _type(body["properties"][name], schemas)
    text = written.get(f"{kind}.{name}") or written[name]
    return _row(f"`{name}`", shown, "required" if name in body["required"] else default, text.rstrip("."))


def _table(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(field: dataclasses.Field[Any]) -> str:
    """What a setting can be: words as code, kinds of values in capitals."""
    if isinstance(field.default, bool):
        return "`true`, `false`"
    known = field.metadata
    values = known["choices"] or (*known["unit"].split("|"), *known["words"])
    return ", ".join(f"`{value}`" if value.islower() else value for value in values)


def _default(value: object) -> str:
    if value in ("", None, [], {}):
        return ""
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _attributes(kind: type) -> dict[str, str]:
    """What a docstring says of each attribute, on one line."""
    found: dict[str, str] = {}
    for title, body in _sections(inspect.getdoc(kind) or ""):
        if title == "Attributes":
            for names, text in _entries(body):
                found |= dict.fromkeys(names.split(", "), text)
    return found


def _sections(doc: str) -> Iterator[tuple[str, str]]:
    """The parts of a docstring: ("", prose), then ("Args", its indented lines) and so on."""
    title, lines = "", []
    for line in doc.splitlines():
        if head := _SECTION.fullmatch(line):
            yield title, "\n".join(lines).strip("\n")
            title, lines = head[1], []
        else:
            lines.append(line)
    yield title, "\n".join(lines).strip("\n")


def _entries(body: str) -> list[tuple[str, str]]:
    """(name, text) of "name: text" lines; lines that are indented further go on with the text."""
    entries: list[list[str]] = []
    for line in textwrap.dedent(body).splitlines():
        if line.startswith(" ") and entries:
            entries[-1][1] += " " + line.strip()
        else:
            name, _, text = line.partition(": ")
            entries.append([name, text])
    return [(name, text) for name, text in entries]


def _prose(thing: object) -> list[str]:
    lines: list[str] = []
    for title, body in _sections(inspect.getdoc(thing) or ""):
        if not title:
            lines += [body, ""]
        elif title == "Returns":
            lines += [*_wrapped(f"Returns: {' '.join(body.split())}"), ""]
        else:
            entries = (_wrapped(f"- `{name}`: {text}", indent="  ") for name, text in _entries(body))
            lines += [f"{title}:", "", *itertools.chain.from_iterable(entries), ""]
    return lines


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _methods(owner: str, kind: type) -> list[str]:
    lines: list[str] = []
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        signature = f"{owner}.{name}" if isinstance(member, property) else _signature(f"{owner}.{name}", member)
        lines += [f"### {owner}.{name}", "", "```python", signature, "```", "", *_prose(member)]
    return lines


def _signature(name: str, thing: Any) -> str:
    """As one would write it: without self, one argument per line if it is long."""
    parameters = [one for one in inspect.signature(thing).parameters.values() if one.name != "self"]
    shown = [_parameter(one) for one in parameters]
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {one}," for one in shown), ")"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    return f"{text} = {'...' if default.startswith('<') else default}"  # such as a default_factory


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, str]:
    """(the type with its bounds, the default) of a field."""
    options = schema.get("anyOf", [schema])
    default = next((one["default"] for one in (schema, *options) if "default" in one), None)
    names = [_one_type(one, schemas) for one in options]
    return " or ".join(dict.fromkeys(name for name in names if name)), _default(default)


def _one_type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _one_type(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in schema:
        return _type(schema, schemas)[0]
    if values := [value for value in schema.get("enum", [schema.get("const")]) if value]:
        return " or ".join(f"`{value}`" for value in values)
    match schema.get("type", ""):
        case "null":
            return ""
        case "array":
            most = schema.get("maxItems", _NO_BOUND)
            items = f"list of {_one_type(schema['items'], schemas)}"
            return f"{items}, at most {most:,}" if most < _NO_BOUND else items
        case "string" if "maxLength" in schema:
            return f"string of at most {schema['maxLength']:,} characters"
        case "integer" | "number" as kind:
            return kind + _bounds(schema)
        case kind:
            return str(kind)


def _bounds(schema: Mapping[str, Any]) -> str:
    """Such as " from 0 to 2"."""
    low, high = schema.get("minimum", -_NO_BOUND), schema.get("maximum", _NO_BOUND)
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}" + (f", up to {high:g}" if high < _NO_BOUND else "")
    match low > -_NO_BOUND, high < _NO_BOUND:
        case True, True:
            return f" from {low:g} to {high:g}"
        case True, False:
            return f" from {low:g}"
        case _:
            return ""


def main() -> int:
    """Write or compare the pages.

    Returns:
        1 if a page is out of date, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not is_check:
            path.write_text(text, encoding="utf-8")
    if stale and is_check:
        print(f"docs/reference is out of date: {', '.join(stale)}; run `python -m scripts.reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
