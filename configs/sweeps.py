"""Named sweeps: lists of settings, each a few changes to one config.

A setting is a dict {field: value}. The field "method" means the text behind the colon of the config file
(`configs/quickstart.py:grpo`); every other one is a dotted field of configs/base.py.

    python -m launch.sweep --sweep=opd_coef --workdir=runs/opd_coef

Settings that differ in numbers only share one compiled update, so list those one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Setting = dict[str, Any]


class Sweep(NamedTuple):
    """about: one line for the list of sweeps; config: the file that is changed, unless --config names another."""

    about: str
    settings: list[Setting]
    config: str = "configs/quickstart.py"


def product(fields: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of the values; the last field varies fastest."""
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def zipped(fields: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """The first value of each field together, then the second, and so on. All fields need as many values."""
    lengths = {field: len(values) for field, values in fields.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"zipped fields need equally many values, got {lengths}")
    return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def chain(*parts: Iterable[Setting]) -> list[Setting]:
    """The settings of each part in turn; one that came before is left out."""
    settings: list[Setting] = []
    for setting in itertools.chain(*parts):
        if setting not in settings:
            settings.append(setting)
    return settings


def cross(*parts: Sequence[Setting]) -> list[Setting]:
    """Every setting of the first part with every one of the second, and so on. No field may occur in two parts."""
    settings: list[Setting] = []
    for combination in itertools.product(*parts):
        fields = [field for setting in combination for field in setting]
        if len(set(fields)) < len(fields):
            raise ValueError(f"crossed settings name a field twice: {', '.join(fields)}")
        settings.append({field: value for setting in combination for field, value in setting.items()})
    return settings


_SEEDS = product({"seed": (0, 1, 2)})
_LIBRARY = {"hindsight.source": "static_library"}

SWEEPS = {
    "seeds": Sweep("one method on five seeds", product({"seed": (0, 1, 2, 3, 4)})),
    "methods": Sweep("GRPO and SEED on three seeds", cross(product({"method": ("grpo", "seed")}), _SEEDS)),
    "opd_coef": Sweep(
        "strength of the distillation: coefficient and steepness of the gate",
        product({"distill.coef": (0.003, 0.01, 0.03), "distill.beta": (1.0, 5.0)}),
    ),
    "gate": Sweep(
        "what the gate adds to a constant weight",
        chain(product({"distill.gate": ("sig_gap",), "distill.beta": (1.0, 5.0)}), [{"distill.gate": "const"}]),
    ),
    "learning_rate": Sweep(
        "learning rate, the larger ones with a warm-up",
        zipped({"optim.lr": (3e-5, 1e-4, 3e-4), "optim.warmup_steps": (0, 0, 10)}),
    ),
    "clip": Sweep(
        "width of the clip range, symmetric and with more room above",
        zipped({"loss.clip_low": (0.1, 0.2, 0.2), "loss.clip_high": (0.1, 0.2, 0.28)}),
    ),
    "penalty": Sweep(
        "the penalty of invalid actions inside and outside of the normalised score",
        product({"adv.invalid_penalty": ("after_norm", "in_score"), "adv.penalty": (0.0, 0.1)}),
    ),
    "skill_source": Sweep(
        "SEED with its own skills, with a fixed library, and GRPO without any",
        chain(
            [{"method": "grpo"}],
            product({"method": ("seed",), "hindsight.source": ("self_hindsight",)}),
            [{"method": "seed", **_LIBRARY}],
        ),
    ),
    "skill_control": Sweep(
        "does the content of the skills matter: SEED with its own, with those of other tasks, with empty words",
        cross(product({"hindsight.control": ("none", "wrong_skill", "placebo")}), _SEEDS),
    ),
    "placement": Sweep(
        "where the skill stands in the teacher's prompt",
        product({"hindsight.placement": ("after_task_line", "user_prefix", "system", "before_template")}),
    ),
}
