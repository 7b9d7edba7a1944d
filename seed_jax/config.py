"""Checks of a run's config, its identity (hash, differences), and clear messages for mistyped overrides."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict

from seed_jax import config_fields as allowed
from seed_jax import config_rules as rules

# Fields (and sections, with a final dot) that a resumed run may change: they alter neither the update nor the episodes,
# nor which evaluations can be compared (the panel of a run is fixed).
# The sections of stage 1 belong to other programs.
FREE_ON_RESUME = (
    "iterations",
    "eval.every",
    "checkpoint.",
    "log.",
    "optim.max_skipped",
    "mesh.",
    "env.workers",
    "env.step_timeout_s",
    "annotate.",
    "sft.",
)


class ConfigError(ValueError):
    """The config cannot work; the message lists every problem with the field, its value and the remedy."""


def check(config: ConfigDict, sections: tuple[str, ...] | None = None) -> None:
    """Raises ConfigError, with one line for each problem, if a value is impossible or two values exclude each other.

    sections: only these count, as "env"; a combination counts if all of its fields do. None = all.
    """
    values = flatten(config)
    known = [
        *allowed.CHOICES,
        *allowed.WHOLE_NUMBERS,
        *allowed.POSITIVE,
        *allowed.NOT_NEGATIVE,
        *allowed.FRACTIONS,
        *allowed.SHARES,
        *allowed.NAMES,
        *allowed.SWITCHES,
        *allowed.TEXTS,
        *allowed.OTHER,
    ]
    missing = [field for field in known if field not in values]
    problems = [f"{field} is missing: start from configs/base.py, which has every field" for field in missing]
    problems += [unknown_field(known, field) for field in values if field not in known]
    if not problems:
        impossible = _single_problems(values)
        counts = lambda field: sections is None or field.split(".")[0] in sections  # noqa: E731
        problems = [message for field, message in impossible.items() if counts(field)]
        problems += _combination_problems(values, set(impossible), counts)
    if problems:
        raise ConfigError("the config cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems))


def warnings(config: ConfigDict) -> list[str]:
    """What a config allows but hardly anyone wants, one line each."""
    values = flatten(config)
    found = []
    if values["distill.kind"] == "gap_nll" and values["distill.gate"] in ("none", "const"):
        found.append(
            f"distill.kind = 'gap_nll', distill.gate = {values['distill.gate']!r}: the gradient does not depend on the "
            "teacher; 'score' is a distillation without a gate"
        )
    if values["distill.kind"] == "gap_nll" and values["distill.gate"] == "outcome":
        found.append(
            "distill.kind = 'gap_nll', distill.gate = 'outcome': this divergence can only reinforce, so in lost "
            "episodes the gate reinforces what the teacher rejects; 'score' pushes it down"
        )
    if values["loss.kl_type"] == "k1" and values["loss.kl_coef"] > 0:
        found.append(
            "loss.kl_type = 'k1': as a loss it pulls nowhere on average; 'k2' has the gradient of the divergence"
        )
    return found


def _single_problems(values: Mapping[str, Any]) -> dict[str, str]:
    """The message for each field whose value is impossible by itself."""
    problems: dict[str, str] = {}

    def require(field: str, holds: bool, requirement: str) -> None:
        if not holds:
            problems[field] = f"{field} = {values[field]!r}: {requirement}"

    for field, choices in allowed.CHOICES.items():
        require(field, values[field] in choices, "must be " + " or ".join(repr(choice) for choice in choices))
    for field, smallest in allowed.WHOLE_NUMBERS.items():
        value = values[field]
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(field, whole and value >= smallest, f"must be a whole number, {smallest} or more")
    for field in allowed.POSITIVE:
        require(field, _is_number(values[field]) and values[field] > 0, "must be a number greater than 0")
    for field in allowed.NOT_NEGATIVE:
        require(field, _is_number(values[field]) and values[field] >= 0, "must be a number, 0 or more")
    for field in allowed.FRACTIONS:
        require(field, _is_number(values[field]) and 0 <= values[field] < 1, "must be 0 or more and less than 1")
    for field in allowed.SHARES:
        require(field, _is_number(values[field]) and 0 < values[field] <= 1, "must be more than 0 and at most 1")
    for field in allowed.NAMES:
        hint = " (a directory in Hugging Face format)" if field == "model.init" else ""
        require(field, isinstance(values[field], str) and values[field] != "", f"must be a non-empty text{hint}")
    for field in allowed.SWITCHES:
        require(field, isinstance(values[field], bool), "must be True or False")
    for field in ("mesh.fsdp", "mesh.tensor"):
        value = values[field]
        require(field, isinstance(value, int) and (value >= 1 or value == -1), "must be 1 or more, or -1 for the rest")
    for field in allowed.TEXTS:
        require(field, isinstance(values[field], str), "must be a text")
    share = values["hindsight.at_rollout"]
    require("hindsight.at_rollout", _is_number(share) and 0 <= share <= 1, "must be a share, from 0 to 1")
    share = values["hindsight.second_attempts"]
    fits = _is_number(share) and 0 <= share < 1
    require("hindsight.second_attempts", fits, "must be a share, 0 or more and less than 1, so that first ones remain")
    dual_clip = values["loss.dual_clip"]
    require("loss.dual_clip", _is_number(dual_clip) and dual_clip > 1, "must be a number greater than 1")
    mix = values["distill.mix"]
    require("distill.mix", _is_number(mix) and 0 <= mix <= 1, "must be a share, from 0 to 1")
    require("distill.threshold", _is_number(values["distill.threshold"]), "must be a number")
    temperatures = values["eval.temperatures"]
    valid = isinstance(temperatures, list) and temperatures and all(_is_number(t) and t >= 0 for t in temperatures)
    require("eval.temperatures", bool(valid), "must be one or more numbers, 0 (greedy) or more, such as (0.0, 0.4)")
    return problems


def _combination_problems(values: Mapping[str, Any], impossible: set[str], counts: Callable[[str], bool]) -> list[str]:
    """Combinations are judged only where each of the values is possible by itself."""
    problems = []
    for fields, clash, why in rules.COMBINATIONS:
        if all(map(counts, fields)) and impossible.isdisjoint(fields) and clash(*(values[field] for field in fields)):
            shown = ", ".join(f"{field} = {values[field]!r}" for field in fields)
            problems.append(f"{shown}: {why}")
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def flatten(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted field name, sorted by name, in the types of JSON (a tuple is a list)."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Mapping[str, Any]) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping):
                walk(f"{prefix}{name}.", value)
            else:
                flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value

    walk("", config.to_dict() if isinstance(config, ConfigDict) else config)
    return dict(sorted(flat.items()))


def to_json(config: ConfigDict) -> str:
    """The config as indented JSON with sorted fields: equal configs give equal text."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def config_hash(config: ConfigDict | Mapping[str, Any]) -> str:
    """Identity of what a run computes, 16 hex digits: equal for configs that differ in FREE_ON_RESUME only."""
    values = {field: value for field, value in flatten(config).items() if not field.startswith(FREE_ON_RESUME)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def diff(
    old: ConfigDict | Mapping[str, Any], new: ConfigDict | Mapping[str, Any], ignore: tuple[str, ...] = ()
) -> list[str]:
    """Lines "field: old -> new" for all fields that differ, except those that start with a member of `ignore`."""
    before, after = flatten(old), flatten(new)
    lines = []
    for field in sorted(before.keys() | after.keys()):
        shown = [repr(values[field]) if field in values else "(absent)" for values in (before, after)]
        if shown[0] != shown[1] and not field.startswith(ignore):
            lines.append(f"{field}: {shown[0]} -> {shown[1]}")
    return lines


def suggest(config: ConfigDict | Mapping[str, Any], dotted: str) -> str:
    """The message for a field that does not exist, with the nearest existing name if one is near."""
    return unknown_field(flatten(config), dotted)


def unknown_field(known: Iterable[str], dotted: str) -> str:
    """As `suggest`, for a list of known field names."""
    known = list(known)
    last = dotted.rsplit(".", 1)[-1]
    # A mistyped section or field is near as a whole; a field without its section equals the last part of the right one.
    near = [field for field in known if field.rsplit(".", 1)[-1] == last]
    near = difflib.get_close_matches(dotted, near, n=1, cutoff=0.8) or near  # its section may be mistyped
    near = near or difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; configs/base.py lists all fields"
    return f"unknown field {dotted}{hint}"


def unknown_overrides(config: ConfigDict | Mapping[str, Any], argv: Sequence[str], flag: str = "config") -> list[str]:
    """A message for every `--config.FIELD` in a command line whose FIELD is neither a field nor a section."""
    fields = flatten(config)
    messages = []
    for argument in argv:
        name = argument.lstrip("-").split("=", 1)[0]
        if argument.startswith("-") and name.startswith(f"{flag}."):
            dotted = name.removeprefix(f"{flag}.")
            if dotted not in fields and not any(field.startswith(f"{dotted}.") for field in fields):
                messages.append(unknown_field(fields, dotted))
    return messages


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse_flags)`: like absl's parser, but a mistyped field gets one clear line.

    For a mistyped field ml_collections raises a bare AttributeError, KeyError or TypeError from inside its flag parser.
    """
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError):
        messages = unknown_overrides(_config_without_overrides(argv), argv)
        if not messages:
            raise
    sys.stderr.write("".join(f"FATAL {message}\n" for message in messages))
    sys.exit(2)


def _config_without_overrides(argv: list[str]) -> ConfigDict:
    bare = [argument for argument in argv if not argument.lstrip("-").startswith("config.")]
    command_line, sys.argv = sys.argv, bare  # ml_collections reads the overrides from here, not from what is parsed
    try:
        flags.FLAGS.unparse_flags()
        flags.FLAGS(bare)
        return flags.FLAGS["config"].value
    finally:
        sys.argv = command_line
