"""Settings of a sweep -> checked configs with directories. Every problem is told before anything runs."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from launch import common
from seed_jax import config as config_lib
from seed_jax.runtime.logging import CONFIG_FILE

METHOD = "method"  # in a setting: the text behind the colon of the config file
MAX_NAME = 100  # characters of a directory name


class SweepError(ValueError):
    """A sweep cannot run as asked; the message lists every problem."""


class Planned(NamedTuple):
    """One setting, ready to run. name: of its directory in the sweep's workdir."""

    name: str
    setting: dict[str, Any]
    config: ConfigDict


def plan(
    config_file: str, settings: Sequence[Mapping[str, Any]], overrides: Mapping[str, str], workdir: Path
) -> list[Planned]:
    """One checked config a setting. Raises SweepError with all problems of all settings.

    config_file: path, with a method behind a colon or not; overrides: {field: text} for every setting, as on the
    command line.
    """
    if not settings:
        raise SweepError("the sweep has no settings")
    swept = sorted(overrides.keys() & {field for setting in settings for field in setting})
    if swept:
        raise SweepError(f"the sweep itself sets {', '.join(swept)}; leave out --config.{swept[0]}")
    names = directory_names(settings)
    runs, problems = [], []
    for name, setting in zip(names, settings, strict=True):
        try:
            config = build(config_file, setting, overrides)
            common.check(config)
            _check_directories(config, workdir / name)
            runs.append(Planned(name, dict(setting), config))
        except (SweepError, *common.INPUT_ERRORS) as error:
            problems.append((name, str(error)))
    if problems:
        told: dict[str, list[str]] = {}  # the same mistake in every setting is told once
        for name, problem in problems:
            told.setdefault(problem, []).append(name)
        lines = [f"- in {_several(where, len(settings))}: {problem}" for problem, where in told.items()]
        raise SweepError("nothing was started:\n" + "\n".join(lines))
    return runs


def _several(names: Sequence[str], total: int) -> str:
    return "every setting" if len(names) == total > 1 else ", ".join(names)


def build(config_file: str, setting: Mapping[str, Any], overrides: Mapping[str, str]) -> ConfigDict:
    """The config of one setting. Raises SweepError for a field that does not exist or a value of another type."""
    path, colon, method = config_file.partition(":")
    changes = {**overrides, **setting}
    if METHOD in changes:
        if colon:
            raise SweepError(f"--config={config_file} names a method, and so does the sweep; leave out {colon}{method}")
        method = changes.pop(METHOD)
    config = _load(path, method or None)
    for field, value in changes.items():
        _set(config, field, value, is_text=field not in setting)
    return config


def _load(path: str, method: str | None) -> ConfigDict:
    file = Path(path)
    if not file.is_file():
        raise SweepError(f"there is no config file {path}")
    module_spec = importlib.util.spec_from_file_location(f"sweep_config_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise SweepError(f"{path} has no get_config")
    try:
        return module.get_config() if method is None else module.get_config(method)
    except (TypeError, ValueError) as error:
        raise SweepError(f"{path}:{method or ''}: {error}") from error


def _set(config: ConfigDict, field: str, value: Any, is_text: bool) -> None:
    """Sets one field. is_text: the value is as on the command line and is read in the type of the field."""
    known = config_lib.flatten(config)
    if field not in known:
        raise SweepError(config_lib.unknown_field(known, field))
    *sections, last = field.split(".")
    node = config
    for section in sections:
        node = node[section]
    old = node[last]
    try:
        node[last] = _read(value, old) if is_text else _like(value, old)
    except (TypeError, ValueError, SyntaxError) as error:
        raise SweepError(f"{field} = {value!r}: must be a {type(old).__name__} such as {old!r}") from error


def _read(text: str, like: Any) -> Any:
    if isinstance(like, str):
        return text
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return _like(ast.literal_eval(text), like)


def _like(value: Any, like: Any) -> Any:
    """The value in the type of the field: whole numbers may stand for real ones, lists for tuples; nothing else."""
    if isinstance(like, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(like, tuple) and isinstance(value, (list, tuple)):
        return tuple(value)
    if type(value) is not type(like):
        raise TypeError(type(value).__name__)
    return value


def _check_directories(config: ConfigDict, directory: Path) -> None:
    """The model exists, and the setting's directory is new or belongs to the same config."""
    if not Path(config.model.init).is_dir():
        raise SweepError(f"model.init = {config.model.init!r}: there is no such directory")
    stored = directory / CONFIG_FILE
    if not stored.exists():
        return
    try:
        saved = json.loads(stored.read_text())
        lines = config_lib.diff(saved, config, config_lib.FREE_ON_RESUME)
    except (ValueError, AttributeError) as error:
        raise SweepError(f"{stored} is not the config of a run ({error}); choose another --workdir") from error
    if lines:
        raise SweepError(f"{directory} belongs to another config ({'; '.join(lines)}); choose another --workdir")


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """["--config.FIELD=VALUE", ...] -> {FIELD: VALUE}. Raises SweepError for any other argument."""
    overrides = {}
    for argument in arguments:
        name, equals, value = argument.lstrip("-").partition("=")
        field = name.removeprefix("config.")
        if not argument.startswith("-") or field == name or not equals:
            raise SweepError(f"cannot use the argument {argument!r}; fields are set with --config.FIELD=VALUE")
        if field == METHOD:
            raise SweepError(f"a method goes behind the colon of --config, as in configs/quickstart.py:{value}")
        overrides[field] = value
    return overrides


def directory_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """ "distill.coef=0.01,beta=5.0": what a setting changes, a section left out where the last part is unambiguous."""
    fields = list(dict.fromkeys(field for setting in settings for field in setting))
    last = [field.rsplit(".", 1)[-1] for field in fields]
    short = {field: part if last.count(part) == 1 else field for field, part in zip(fields, last, strict=True)}
    names = [_name({short[field]: value for field, value in setting.items()}) for setting in settings]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SweepError(f"the sweep has a setting twice: {', '.join(twice)}")
    return names


def _name(setting: Mapping[str, Any]) -> str:
    text = ",".join(f"{field}={_shown(value)}" for field, value in setting.items()) or "unchanged"
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if name == text and len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _shown(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
