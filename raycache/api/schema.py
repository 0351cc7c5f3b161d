"""Request bodies of the OpenAI API, checked strictly.

A value of the wrong type is refused, not converted, and an unknown field is refused, not ignored: a setting that has no
effect would go unnoticed. Null is the same as absent. Ranges of sampling settings are checked by SamplingParams.

Only the first error is told, and a body that is wrong in very many places costs no more than one that is right: lists
end at their first wrong item, and what can have an error per item is counted before its items are looked at.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from raycache.api.neutral import is_neutral
from raycache.api.tools import MAX_TOOLS, ToolChoice, check_tools, tool_choice
from raycache.errors import RequestError
from raycache.spelling import did_you_mean

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_COMPLETION_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_OPTIONS = 16
_NAME_CHARS = 64  # of an unknown field, to find one like it
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

# Clients send these; they tell an operator something or promise something that is true anyway, and change no output.
IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)


def _check_prompts(value: object) -> list[str | Sequence[int]]:
    match value:
        case str() | array():  # an array comes from prompt_ids.py, so it has integers
            return [value]
        case [] | [[], *_]:
            raise PydanticCustomError("prompt", "must not be empty")
        case list() if _are(value, int):
            return [value]
        case list() if _are(value, str):
            return list(value)
        case list() if _are(value, list) and all(item and _are(item, int) for item in value):
            return list(value)
    raise PydanticCustomError("prompt", "must be a string, a list of strings, a list of token ids or a list of those")


def _check_stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not _are(stops, str):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError(
            "stop", "must contain at most {limit} strings, got {count}", {"limit": MAX_STOPS, "count": len(stops)}
        )
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError("stop", "must have at most {limit} characters each", {"limit": MAX_STOP_CHARS})
    return stops


def _check_salt(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("salt", "must be a string")
    if len(value) > MAX_SALT_CHARS:
        raise PydanticCustomError(
            "salt", "must have at most {limit} characters, got {count}", {"limit": MAX_SALT_CHARS, "count": len(value)}
        )
    return value


def _at_most(limit: int, *, what: str) -> BeforeValidator:
    """Refuses longer lists and objects before their items are looked at."""

    def check(value: object) -> object:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError("count", "must have at most {limit} {what}", {"limit": limit, "what": what})
        return value

    return BeforeValidator(check)


def _are(values: list[Any], kind: type) -> bool:
    """Whether all are exactly of that type: True is not an int here."""
    return set(map(type, values)) <= {kind}


# The types are for the description of the API only; the functions check.
_Prompts = PlainValidator(_check_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
_Stops = PlainValidator(_check_stops, json_schema_input_type=str | list[str])
_Salt = PlainValidator(_check_salt, json_schema_input_type=str)
_Tools = PlainValidator(check_tools, json_schema_input_type=list[dict[str, Any]])


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, sent: object) -> object:
        return {name: value for name, value in sent.items() if value is not None} if isinstance(sent, dict) else sent


class JsonSchema(BaseModel):
    """A schema that the answer follows; without one, any JSON object."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """The form of the answer, one of these. Beyond the OpenAI API."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StrictBody(BaseModel):
    """A request body."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    of_other_apis: ClassVar[Mapping[str, str]] = {}
    """Fields of other APIs that would be missed if they were ignored, and what says the same here."""

    def check(self) -> None:
        """What does not fit together or is not supported.

        Raises:
            RequestError: names the field.
        """


class GenerationBody(StrictBody):
    """What both endpoints share. The second group is beyond the OpenAI API."""

    of_other_apis: ClassVar[Mapping[str, str]] = {
        f"guided_{form}": f"structured_outputs.{form}" for form in ("json", "regex", "choice", "grammar")
    }
    model: str
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, _at_most(MAX_OPTIONS, what="fields")] = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: Annotated[list[str], _Stops] = []
    logit_bias: Annotated[dict[str, float], _at_most(MAX_BIASES, what="tokens")] = Field(
        default={}, max_length=MAX_BIASES
    )

    top_k: int = Field(default=0, ge=-1)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[int], FailFast(), _at_most(MAX_STOP_IDS, what="ids")] = Field(
        default=[], max_length=MAX_STOP_IDS
    )
    min_tokens: int = Field(default=0, ge=0, le=_INT32)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = Field(default=0, ge=-_INT32, le=_INT32)
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cache_salt: Annotated[str, _Salt] = ""
    cache_priority: int = Field(default=0, ge=-_INT32, le=_INT32)
    cache_ttl_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    return_cache_info: bool = False
    structured_outputs: Annotated[StructuredOutputs | None, _at_most(MAX_OPTIONS, what="fields")] = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", field="stream_options")
        if self.cache_ttl_s and not self.cache_priority:
            raise RequestError("cache_ttl_s limits how long cache_priority holds; send both", field="cache_ttl_s")
        self.output_form()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def output_form(self) -> tuple[str, Any] | None:
        """What the output must look like: a field of `structured_outputs` and its value, or None.

        Raises:
            RequestError: more than one form is wanted.
        """
        return _only(self._forms())

    def _forms(self) -> list[tuple[str, Any]]:
        if self.structured_outputs is None:
            return []
        sent = self.structured_outputs.model_dump(by_alias=True)
        return [(name, value) for name, value in sent.items() if value is not None and value is not False]


class CompletionBody(GenerationBody):
    """Body of /v1/completions. `prompt` is always a list after validation."""

    prompt: Annotated[list[str | Sequence[int]], _Prompts]
    max_tokens: int | None = Field(default=None, ge=0, le=_INT32)
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    best_of: int | None = None
    suffix: str = ""

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(f"best_of is not supported; leave it out or set it to n={self.n}", field="best_of")
        if self.suffix:
            raise RequestError("suffix is not supported; leave it out", field="suffix")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1, or 0 with echo=true", field="max_tokens")


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    of_other_apis: ClassVar[Mapping[str, str]] = {
        **GenerationBody.of_other_apis,
        "functions": "tools",
        "function_call": "tool_choice",
    }
    messages: Annotated[list[dict[str, Any]], FailFast()]
    max_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], _at_most(MAX_TOOLS, what="tools"), _Tools] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    modalities: Annotated[list[Literal["text"]], FailFast()] = ["text"]
    reasoning_effort: str | None = None

    thinking_token_budget: int | None = Field(default=None, ge=0, le=_INT32)
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    cache_repairs: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        if self.choose_tools().is_required and self.output_form():
            raise RequestError("response_format and a required tool exclude each other", field="tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", field="max_tokens")

    def choose_tools(self) -> ToolChoice:
        """The tools that may be called.

        Raises:
            RequestError: `tool_choice` is malformed, or names a tool that is not there.
        """
        return tool_choice(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls)

    def _forms(self) -> list[tuple[str, Any]]:
        match self.response_format:
            case None | ResponseFormat(type="text"):
                return super()._forms()
            case ResponseFormat(json_schema=JsonSchema(json_schema=dict(schema))):
                return [*super()._forms(), ("json", schema)]
        return [*super()._forms(), ("json_object", True)]


def _only(forms: list[tuple[str, Any]]) -> tuple[str, Any] | None:
    if len(forms) > 1:
        raise RequestError("only one output format can be requested", field="structured_outputs")
    return forms[0] if forms else None


def parse_json(body: bytes, *, example: str = "") -> dict[str, Any]:
    """Read a request body.

    Args:
        example: what to show in its place if it is not an object.
    Raises:
        RequestError: it is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError:  # it says less about what is wrong, and takes no more than 200 levels
        value = _parse_json_slowly(body)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object{example and f', such as {example}'}")
    return value


def _parse_json_slowly(body: bytes) -> Any:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\ud" in body.lower():  # half of a surrogate pair is JSON but not text, and no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise RequestError("the body contains an unpaired surrogate (\\ud800 to \\udfff), which is not text") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except ValueError as error:  # NaN, Infinity, or an integer of thousands of digits
        raise RequestError("the body contains a number that is not finite or has too many digits") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    return value


Body = TypeVar("Body", bound=StrictBody)


def parse_body(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """Check a request body against its schema.

    Args:
        kind: such as CompletionBody.
    Raises:
        RequestError: names the field and what it must be.
    """
    known = kind.model_fields
    sent = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    sent = {name: value for name, value in sent.items() if name in known or not is_neutral(name, value)}
    for name in sent.keys() & kind.of_other_apis:
        raise RequestError(f"{name} is a field of another API; here it is {kind.of_other_apis[name]}", field=name)
    unknown = [name for name in sent if name not in known]
    for name in unknown[1:]:  # each would be an error, and the first one is told
        del sent[name]
    try:
        parsed = kind.model_validate(sent)
    except ValidationError as error:
        raise _first_error(error, kind) from error
    parsed.check()
    return parsed


def _first_error(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    errors = error.errors(include_url=False, include_context=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden" and _near(each["loc"], kind)), errors[0])
    place = [part for part in first["loc"] if isinstance(part, int) or not part.startswith("function-")]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    match first["type"]:
        case "missing":
            return RequestError(f"{field} is required", field=field)
        case "extra_forbidden":
            near = _near(first["loc"], kind) or " and would have no effect; leave it out"
            return RequestError(f"{field} is not supported{near}", field=field)
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    text = wanted if wanted.startswith("must ") else f"must be {wanted}"
    return RequestError(f"{field} {text}, got {_short(first['input'])}", field=field)


def _near(place: Sequence[int | str], kind: type[BaseModel]) -> str:
    """Suggests the name of a field instead of the last one of a place, in the object that it is in."""
    model: type[BaseModel] | None = kind
    for number, part in enumerate(place):
        if model is None:
            break
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if number == len(place) - 1:
            return did_you_mean(str(part)[:_NAME_CHARS], fields)
        model = _model_in(fields[part].annotation) if part in fields else None
    return ""


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in a type such as `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
