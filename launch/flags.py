"""Derives flags and YAML keys from the fields of `Config`, so that each setting is defined once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from launch.environment import api_key, cpu_threads, storage
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.settings import kind_of
from raycache.spelling import did_you_mean

_EPILOG = "These are the most common settings; --help-all shows all."
_YAML = "All settings can also be given in the YAML file, with _ instead of -, such as `kv_memory: 4GiB`."
_OF_OTHERS = {
    "--tensor-parallel-size": "use --tp",
    "--tensor-parallel": "use --tp",
    "--pipeline-parallel-size": "use --pp",
    "--max-model-length": "use --max-model-len",
    "--context-length": "use --max-model-len",
    "--gpu-memory-utilization": "use --kv-memory, a size such as 4GiB",
    "--mem-fraction-static": "use --kv-memory, a size such as 4GiB",
    "--max-num-seqs": "use --max-running",
    "--max-num-batched-tokens": "use --max-step-tokens",
    "--chunked-prefill-size": "use --max-step-tokens",
    "--enable-prefix-caching": "not needed: --prefix-cache is the default",
    "--kv-cache-dtype": "use --kv-dtype",
    "--speculative-config": "use --draft",
    "--speculative-model": "use --draft",
    "--speculative-algorithm": "use --draft",
    "--speculative-draft-model-path": "use --draft",
    "--speculative-num-draft-tokens": "use --draft-tokens",
}
"""Flags of vLLM and SGLang, and what to use instead."""


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviations, and suggests the flag or command that was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(  # type: ignore[override]  # one signature instead of three overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like argparse, but unknown arguments are rejected by the subcommand instead of the main parser."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0])
        return options, unknown

    def _refuse(self, word: str) -> NoReturn:
        hint = did_you_mean(word, self._option_string_actions) if word.startswith("-") else ""
        if word.startswith("-") and "--help-all" in self._option_string_actions:
            hint = f"; {_OF_OTHERS[word]}" if word in _OF_OTHERS else hint or "; --help-all shows all flags"
        self.error(f"unknown {'flag' if word.startswith('-') else 'argument'} {word!r}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        near = did_you_mean(str(value), map(str, action.choices))
        raise argparse.ArgumentError(action, f"unknown {value!r}{near or '; use one of ' + ', '.join(action.choices)}")


def add_config_flags(parser: argparse.ArgumentParser, *, shows_all: bool = False) -> None:
    """Add MODEL, --config and one flag per setting. Flags that are not given are absent from the parsed options.

    Args:
        shows_all: whether --help lists all settings instead of the common ones.
    """
    parser.usage = f"{parser.prog} [MODEL] [--config FILE.yaml] [--SETTING VALUE ...]"
    parser.epilog = _YAML if shows_all else f"{_EPILOG}\n{_YAML}"
    fields = {field.name: field for field in dataclasses.fields(Config)}
    model = fields.pop("model")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=_help(model))
    parser.add_argument("--config", metavar="FILE.yaml", type=Path, help="YAML file of settings; flags override it")
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings and exit")
    groups: dict[str, Any] = {}
    for field in fields.values():
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field, is_shown=shows_all or field.metadata["is_common"])


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings from the YAML file, the environment and the flags, in increasing precedence; not yet validated.

    Raises:
        ConfigError: the file cannot be read, or no model is given.
    """
    names = {field.name for field in dataclasses.fields(Config)}
    values = from_yaml(options.config) if options.config else {}
    if api_key():
        values["api_key"] = api_key()
    if storage():
        values["storage"] = storage()
    if threads := cpu_threads():
        values["cpu_threads"] = threads
    values |= {name: value for name, value in vars(options).items() if name in names}
    if not values.get("model"):
        raise ConfigError("no model given; pass a model directory or name, or set `model:` in the --config file")
    return values


def seconds(text: str) -> float:
    """Parse a flag's value: a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


class _HelpAll(argparse.Action):
    """Prints the help of a command with all settings."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        whole = Parser(prog=parser.prog, description=parser.description)
        add_config_flags(whole, shows_all=True)
        whole.print_help()
        parser.exit()


def _add_flag(group: Any, field: dataclasses.Field[Any], *, is_shown: bool) -> None:
    flag = "--" + field.name.replace("_", "-")
    text = _help(field) if is_shown else argparse.SUPPRESS
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if isinstance(field.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    choices, unit = field.metadata["choices"] or None, "|".join((field.metadata["unit"], *field.metadata["words"]))
    group.add_argument(flag, type=_reader(field), choices=choices, metavar=None if choices else unit, **common)


def _reader(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """Parser for a flag's value; its range is validated later, with all other settings."""
    kind = kind_of(field)

    def read(text: str) -> Any:
        if text in field.metadata["words"]:
            return text
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                " or ".join((f"{text!r} is not {what}", *field.metadata["words"]))
            ) from None

    return read


def _help(field: dataclasses.Field[Any]) -> str:
    """Help text for argparse, with the default unless that is empty."""
    text = str(field.metadata["help"]).replace("%", "%%")
    if field.default == "":
        return text
    default = "yes" if field.default is True else "no" if field.default is False else field.default
    unit = " s" if field.metadata["unit"] == "SECONDS" else ""
    return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default}{unit})"


def from_yaml(path: Path) -> dict[str, Any]:
    """Settings in a file, not yet validated.

    Raises:
        ConfigError: the file cannot be read.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        reason = " ".join(str(cause).split())
        raise ConfigError(f"cannot read the settings in {path}: {reason}") from cause
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must contain settings, one `name: value` per line, such as `tp: 2`")
    return values
