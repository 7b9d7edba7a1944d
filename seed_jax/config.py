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

# Fields (and sections, with a final dot) that a resumed run may change: they alter neither the update nor the episodes,
# nor which evaluations can be compared (the panel of a run is fixed).
FREE_ON_RESUME = ("iterations", "eval.every", "checkpoint.", "log.", "mesh.", "env.workers", "env.step_timeout_s")

_CHOICES: dict[str, tuple[str, ...]] = {
    "old_logprobs": ("recompute", "sampler"),
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full"),
    "env.engine": ("native", "textworld"),
    "env.prompt": ("released", "compact"),
    "hindsight.source": ("none", "self_hindsight", "external_hindsight", "static_library", "skill_bank"),
    "hindsight.retrieval": ("task_type", "keyword", "keyword_full_prompt", "all"),
    "hindsight.control": ("none", "wrong_skill", "placebo"),
    "hindsight.placement": ("after_task_line", "user_prefix", "before_template", "system"),
    "hindsight.at_eval": ("no", "yes", "both"),
    "rollout.group_filter": ("off", "mask", "dynamic"),
    "adv.kind": ("grpo", "drgrpo", "rloo", "gigpo", "reinforce_pp", "zero"),
    "adv.stat": ("rows", "episodes"),
    "adv.normalize": ("std", "mean"),
    "adv.invalid": ("format", "inadmissible"),
    "adv.invalid_penalty": ("in_score", "after_norm"),
    "adv.shape": ("none", "add_gap", "mult_clip", "add_gate"),
    "loss.kind": ("ppo_clip", "gspo", "gspo_token", "reinforce"),
    "loss.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "loss.kl_type": ("k3", "k1", "k2", "full"),
    "distill.kind": (
        "none",
        "gap_nll",
        "score",
        "k2",
        "k3",
        "k3_is",
        "full_rev",
        "full_fwd",
        "full_jsd",
        "topk_rev",
        "topk_fwd",
        "topk_jsd",
    ),
    "distill.support": ("tail", "renorm"),
    "distill.gate": ("sig_gap", "const", "none", "hard", "centered", "outcome", "standardised"),
    "distill.gap": ("current", "old"),
    "distill.teacher": ("old", "current", "ema", "periodic", "frozen_init"),
    "distill.rows": ("with_skill", "failed_only", "success_only"),
    "distill.span": ("all", "action", "thought"),
    "distill.denominator": ("masked", "all"),
    "distill.schedule": ("const", "linear", "window", "handoff"),
    "eval.split": ("seen", "unseen"),
}

_WHOLE_NUMBERS = {  # field -> smallest value that makes sense
    "seed": 0,
    "iterations": 1,
    "env.max_steps": 1,
    "env.history": 0,
    "env.train_tasks": 1,
    "env.workers": 0,
    "rollout.tasks": 1,
    "rollout.group": 1,
    "rollout.max_response_tokens": 1,
    "rollout.max_prompt_tokens": 1,
    "rollout.batch": 1,
    "rollout.prompt_bucket": 1,
    "rollout.max_rounds": 1,
    "adv.overlong_buffer": 0,
    "distill.top_k": 1,
    "distill.refresh_every": 1,
    "distill.schedule_start": 0,
    "distill.schedule_stop": 0,
    "distill.schedule_patience": 1,
    "hindsight.max_analysis_tokens": 1,
    "hindsight.max_skill_tokens": 1,
    "hindsight.min_words": 1,
    "hindsight.min_coverage_iterations": 0,
    "hindsight.api_workers": 1,
    "optim.warmup_steps": 0,
    "pack.row_tokens": 1,
    "pack.teacher_row_tokens": 1,
    "pack.max_turns_per_row": 1,
    "pack.scored_tokens_per_row": 1,
    "pack.rows_per_micro": 1,
    "pack.micros_per_mini": 1,
    "eval.every": 0,
    "eval.games": 1,
    "eval.seed": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "log.episodes_per_iteration": 0,
    "log.grad_norms_every": 0,
    "log.diagnostics_episodes": 0,
}

# Real numbers: must be > 0, >= 0, in [0, 1), or in (0, 1].
_POSITIVE = (
    "env.step_timeout_s",
    "rollout.temperature",
    "hindsight.api_timeout_s",
    "adv.eps",
    "optim.lr",
    "optim.eps",
    "optim.grad_clip",
)
_NOT_NEGATIVE = (
    "adv.std_floor",
    "adv.penalty",
    "adv.step_weight",
    "adv.overlong_penalty",
    "adv.shape_weight",
    "loss.rl_coef",
    "loss.clip_high",
    "loss.importance_cap",
    "loss.kl_coef",
    "loss.entropy_coef",
    "distill.beta",
    "distill.coef",
    "distill.clip",
    "distill.schedule_end",
    "optim.weight_decay",
)
_FRACTIONS = ("adv.shape_clip", "loss.clip_low", "optim.b1", "optim.b2")
_SHARES = ("adv.gamma", "adv.anchor_similarity", "distill.ema_rate")
_NAMES = ("method", "model.init", "env.name", "env.data", "env.size")
_SWITCHES = ("rollout.require_think", "log.tensorboard")
_TEXTS = ("hindsight.library", "hindsight.api_url", "hindsight.api_model")  # may be empty
_OTHER = (
    "mesh.fsdp",
    "mesh.tensor",
    "loss.dual_clip",
    "distill.mix",
    "distill.threshold",
    "eval.temperatures",
    "hindsight.at_rollout",
)

_LIBRARIES = ("static_library", "skill_bank")
_ANEW = "keyword_full_prompt"


# Fields that exclude each other: (fields, whether their values clash, why and what to do).
_COMBINATIONS: tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...] = (
    (
        ("adv.kind", "rollout.group"),
        lambda kind, group: kind in ("grpo", "drgrpo", "rloo", "gigpo") and group < 2,
        "a reward is compared inside its group, so a group needs 2 episodes or more",
    ),
    (
        ("env.train_tasks", "rollout.tasks"),
        lambda available, wanted: available < wanted,
        "an iteration needs more tasks than there are; lower rollout.tasks or raise env.train_tasks",
    ),
    (
        ("adv.kind", "adv.normalize"),
        lambda kind, normalize: kind in ("drgrpo", "rloo") and normalize == "std",
        "this estimator has no standard deviation; set adv.normalize = 'mean', or adv.kind = 'grpo'",
    ),
    (
        ("distill.kind", "adv.shape", "hindsight.source"),
        lambda kind, shape, source: (kind != "none" or shape != "none") and source == "none",
        "a teacher needs skills; set hindsight.source = 'self_hindsight', or distill.kind = 'none' and "
        "adv.shape = 'none'",
    ),
    (
        ("loss.rl_coef", "adv.kind", "adv.shape", "distill.kind", "distill.coef"),
        lambda rl_coef, kind, shape, distill, coef: (
            (rl_coef == 0 or (kind == "zero" and shape in ("none", "mult_clip"))) and (distill == "none" or coef == 0)
        ),
        "nothing is left to learn from, so this can only be evaluated; to train, raise one of the coefficients above 0 "
        "(loss.rl_coef needs an advantage, distill.coef a distill.kind)",
    ),
    (
        ("loss.kind", "loss.aggregation"),
        lambda kind, aggregation: kind in ("gspo", "gspo_token") and aggregation != "seq_mean_token_mean",
        "a ratio of whole turns is averaged over turns; set loss.aggregation = 'seq_mean_token_mean'",
    ),
    (
        ("loss.kind", "adv.shape"),
        lambda kind, shape: kind == "gspo" and shape != "none",
        "the teacher makes advantages that differ between tokens; set loss.kind = 'gspo_token'",
    ),
    (
        ("loss.importance_cap", "old_logprobs"),
        lambda cap, old: cap > 0 and old == "sampler",
        "the weight compares trainer with sampler; set old_logprobs = 'recompute', or loss.importance_cap = 0.0",
    ),
    (
        ("distill.gate", "adv.kind", "distill.kind"),
        lambda gate, kind, distill: gate == "outcome" and kind == "zero" and distill != "none",
        "the gate follows the sign of the advantage, which is always 0; choose another gate or advantage",
    ),
    (
        ("distill.schedule", "distill.schedule_start", "distill.schedule_stop"),
        lambda schedule, start, stop: (
            schedule != "const" and (stop < start or (stop == start and schedule != "window"))
        ),
        "the schedule ends before it begins; raise distill.schedule_stop",
    ),
    (
        ("distill.schedule", "distill.kind", "adv.shape"),
        lambda schedule, kind, shape: schedule != "const" and kind == "none" and shape == "none",
        "there is no teacher to be scheduled; set distill.schedule = 'const'",
    ),
    (
        ("adv.overlong_buffer", "rollout.max_response_tokens"),
        lambda buffer, response: buffer > response,
        "a reply would cost reward before its first token; lower adv.overlong_buffer",
    ),
    (
        ("hindsight.source", "distill.kind", "adv.shape", "hindsight.at_rollout", "hindsight.at_eval"),
        lambda source, kind, shape, share, panel: (
            source != "none" and kind == "none" and shape == "none" and share == 0 and panel == "no"
        ),
        "skills would be written and never used; set hindsight.source = 'none', or distill.kind = 'gap_nll'",
    ),
    (
        ("hindsight.at_rollout", "hindsight.at_eval", "hindsight.source"),
        lambda share, panel, source: (share > 0 or panel != "no") and source not in _LIBRARIES,
        "only skills that exist before an episode can be read in it; set the first two to 0.0 and 'no', or "
        "hindsight.source = 'static_library' or 'skill_bank'",
    ),
    (
        ("hindsight.at_rollout", "distill.kind", "adv.shape"),
        lambda share, kind, shape: share == 1 and (kind != "none" or shape != "none"),
        "the policy would read what its teacher reads, so there is nothing to distill; lower the share, or set "
        "distill.kind = 'none' and adv.shape = 'none'",
    ),
    (
        ("hindsight.source", "hindsight.library"),
        lambda source, library: source in _LIBRARIES and not library,
        "name the folder (static_library) or the JSON file (skill_bank) in the second",
    ),
    (
        ("hindsight.source", "hindsight.api_url", "hindsight.api_model"),
        lambda source, url, model: source == "external_hindsight" and not (url and model),
        "name the service and its model in the last two",
    ),
    (
        ("hindsight.control", "hindsight.source"),
        lambda control, source: control != "none" and source == "none",
        "a control replaces skills and there are none; set hindsight.control = 'none', or a source",
    ),
    (
        ("hindsight.control", "hindsight.source", "hindsight.retrieval"),
        lambda control, source, retrieval: (
            source in _LIBRARIES
            and (control, retrieval) in (("wrong_skill", "all"), ("wrong_skill", _ANEW), ("placebo", _ANEW))
        ),
        "a control needs one skill an episode; set hindsight.retrieval = 'task_type' or 'keyword'",
    ),
    (
        ("adv.normalize", "adv.std_floor"),
        lambda normalize, floor: normalize == "mean" and floor > 0,
        "without a standard deviation its floor does nothing; set adv.std_floor = 0.0, or adv.normalize = 'std'",
    ),
    (
        ("pack.row_tokens", "rollout.max_prompt_tokens", "rollout.max_response_tokens"),
        lambda row, prompt, response: row < prompt + response,
        "a row must hold a whole turn; raise the first to the sum of the others, or lower these",
    ),
    (
        (
            "pack.row_tokens",
            "rollout.max_prompt_tokens",
            "hindsight.max_skill_tokens",
            "rollout.max_response_tokens",
            "hindsight.at_rollout",
        ),
        lambda row, prompt, skill, response, share: share > 0 and prompt + response <= row < prompt + skill + response,
        "a row must hold a turn and the skill it was played with; raise the first to the sum of the next three",
    ),
    (
        ("pack.scored_tokens_per_row", "rollout.max_response_tokens"),
        lambda scored, response: scored < response,
        "a row must score a whole response; raise the first to the second, or lower this",
    ),
    (
        (
            "pack.teacher_row_tokens",
            "rollout.max_prompt_tokens",
            "hindsight.max_skill_tokens",
            "rollout.max_response_tokens",
            "distill.kind",
            "adv.shape",
        ),
        lambda row, prompt, skill, response, kind, shape: (
            (kind != "none" or shape != "none") and row < prompt + skill + response
        ),
        "a teacher row must hold a whole turn and its skill; raise the first to the sum of the next three",
    ),
    (
        ("mesh.fsdp", "mesh.tensor"),
        lambda fsdp, tensor: fsdp == -1 and tensor == -1,
        "only one of them can be 'all that is left'; give the other a number of devices",
    ),
)


class ConfigError(ValueError):
    """The config cannot work; the message lists every problem with the field, its value and the remedy."""


def check(config: ConfigDict) -> None:
    """Raises ConfigError, with one line for each problem, if a value is impossible or two values exclude each other."""
    values = flatten(config)
    known = [
        *_CHOICES,
        *_WHOLE_NUMBERS,
        *_POSITIVE,
        *_NOT_NEGATIVE,
        *_FRACTIONS,
        *_SHARES,
        *_NAMES,
        *_SWITCHES,
        *_TEXTS,
        *_OTHER,
    ]
    missing = [field for field in known if field not in values]
    problems = [f"{field} is missing: start from configs/base.py, which has every field" for field in missing]
    problems += [unknown_field(known, field) for field in values if field not in known]
    if not problems:
        impossible = _single_problems(values)
        problems = [*impossible.values(), *_combination_problems(values, set(impossible))]
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

    for field, choices in _CHOICES.items():
        require(field, values[field] in choices, "must be " + " or ".join(repr(choice) for choice in choices))
    for field, smallest in _WHOLE_NUMBERS.items():
        value = values[field]
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(field, whole and value >= smallest, f"must be a whole number, {smallest} or more")
    for field in _POSITIVE:
        require(field, _is_number(values[field]) and values[field] > 0, "must be a number greater than 0")
    for field in _NOT_NEGATIVE:
        require(field, _is_number(values[field]) and values[field] >= 0, "must be a number, 0 or more")
    for field in _FRACTIONS:
        require(field, _is_number(values[field]) and 0 <= values[field] < 1, "must be 0 or more and less than 1")
    for field in _SHARES:
        require(field, _is_number(values[field]) and 0 < values[field] <= 1, "must be more than 0 and at most 1")
    for field in _NAMES:
        hint = " (a directory in Hugging Face format)" if field == "model.init" else ""
        require(field, isinstance(values[field], str) and values[field] != "", f"must be a non-empty text{hint}")
    for field in _SWITCHES:
        require(field, isinstance(values[field], bool), "must be True or False")
    for field in ("mesh.fsdp", "mesh.tensor"):
        value = values[field]
        require(field, isinstance(value, int) and (value >= 1 or value == -1), "must be 1 or more, or -1 for the rest")
    for field in _TEXTS:
        require(field, isinstance(values[field], str), "must be a text")
    share = values["hindsight.at_rollout"]
    require("hindsight.at_rollout", _is_number(share) and 0 <= share <= 1, "must be a share, from 0 to 1")
    dual_clip = values["loss.dual_clip"]
    require("loss.dual_clip", _is_number(dual_clip) and dual_clip > 1, "must be a number greater than 1")
    mix = values["distill.mix"]
    require("distill.mix", _is_number(mix) and 0 <= mix <= 1, "must be a share, from 0 to 1")
    require("distill.threshold", _is_number(values["distill.threshold"]), "must be a number")
    temperatures = values["eval.temperatures"]
    valid = isinstance(temperatures, list) and temperatures and all(_is_number(t) and t >= 0 for t in temperatures)
    require("eval.temperatures", bool(valid), "must be one or more numbers, 0 (greedy) or more, such as (0.0, 0.4)")
    return problems


def _combination_problems(values: Mapping[str, Any], impossible: set[str]) -> list[str]:
    """Combinations are judged only where each of the values is possible by itself."""
    problems = []
    for fields, clash, why in _COMBINATIONS:
        if impossible.isdisjoint(fields) and clash(*(values[field] for field in fields)):
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
