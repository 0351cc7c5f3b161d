"""Flags and YAML keys from the fields of `Config`, so that a setting is written down once."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from launch.environment import api_key, storage
from raycache.config import Config
from raycache.errors import ConfigError


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config and one flag per setting. A flag that is not given leaves no trace in the parsed options."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    model = fields.pop("model")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=_escaped(model))
    parser.add_argument("--config", metavar="FILE.yaml", type=Path, help="settings as YAML; flags override it")
    groups: dict[str, Any] = {}
    for field in fields.values():
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(f"{name} settings")
        _add_flag(groups[name], field)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings from the YAML file, the environment and the flags, the later over the earlier; not checked yet.

    Raises:
        ConfigError: the file cannot be read, or there is no model.
    """
    names = {field.name for field in dataclasses.fields(Config)}
    values = from_yaml(options.config) if options.config else {}
    if api_key():
        values["api_key"] = api_key()
    if storage():
        values["storage"] = storage()
    values |= {name: value for name, value in vars(options).items() if name in names}
    if not values.get("model"):
        raise ConfigError("no model; name the directory of one, or `model:` in the file of --config")
    return values


def seconds(text: str) -> float:
    """A flag's value: a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _escaped(field)}
    if isinstance(field.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    kind = type(field.default)
    choices = field.metadata["choices"] or None
    metavar = None if choices else {int: "N", float: "SECONDS"}.get(kind, "TEXT")
    group.add_argument(flag, type=kind, choices=choices, metavar=metavar, **common)


def _escaped(field: dataclasses.Field[Any]) -> str:
    """Help text as argparse wants it, with the default if that says something."""
    text = str(field.metadata["help"]).replace("%", "%%")
    default = "yes" if field.default is True else field.default
    return f"{text} (default: {default})" if field.default not in ("", 0) else text


def from_yaml(path: Path) -> dict[str, Any]:
    """Settings of a file, not checked yet.

    Raises:
        ConfigError: it cannot be read.
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
        raise ConfigError(f"{path} must hold settings, one `name: value` a line, such as `tp: 2`")
    return values
