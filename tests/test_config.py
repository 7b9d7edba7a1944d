"""Bad values are refused with a clear message; a config has a stable identity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import base
from seed_jax import config as config_lib

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = {"hindsight__source": "static_library"}


def make_config(**overrides: object) -> ConfigDict:
    """The base config with `section__field=value` set, and the one field that has no default."""
    config = base.get_config()
    config.model.init = "some/directory"
    with config.unlocked(), config.ignore_type():
        for name, value in overrides.items():
            *sections, field = name.split("__")
            node = config
            for section in sections:
                node = node[section]
            node[field] = value
    return config


def problems(config: ConfigDict) -> list[str]:
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.check(config)
    return [line.removeprefix("  - ") for line in str(error.value).splitlines()[1:]]


def test_base_config_needs_only_a_model():
    config_lib.check(make_config())
    assert problems(base.get_config()) == [
        "model.init = '': must be a non-empty text (a directory in Hugging Face format)"
    ]


def test_every_field_has_a_comment():
    source = (ROOT / "configs" / "base.py").read_text().splitlines()
    for field in config_lib.flatten(base.get_config()):
        name = field.rsplit(".", 1)[-1]
        lines = [line for line in source if f".{name} = " in line]
        assert lines and any("  # " in line for line in lines), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("iterations", 0),
        ("iterations", True),
        ("method", ""),
        ("old_logprobs", "guess"),
        ("model__dtype", "float16"),
        ("model__remat", "some"),
        ("mesh__fsdp", 0),
        ("mesh__tensor", -2),
        ("env__engine", "unity"),
        ("env__data_fraction", 0.0),
        ("env__data_fraction", 1.1),
        ("eval__games", -1),
        ("rollout__thinking", "sometimes"),
        ("env__max_steps", 0),
        ("env__history", -1),
        ("env__workers", -1),
        ("env__step_timeout_s", 0.0),
        ("rollout__tasks", 0),
        ("rollout__tasks", 2.5),
        ("rollout__temperature", 0.0),
        ("rollout__temperature", float("nan")),
        ("rollout__max_response_tokens", 0),
        ("rollout__require_think", "yes"),
        ("hindsight__source", "oracle"),
        ("hindsight__retrieval", "embedding"),
        ("hindsight__control", "shuffled"),
        ("hindsight__placement", "footer"),
        ("hindsight__at_rollout", 1.5),
        ("hindsight__at_rollout", "half"),
        ("hindsight__second_attempts", 1.0),
        ("hindsight__second_attempts", -0.1),
        ("hindsight__second_attempts", "half"),
        ("hindsight__train_second", 1),
        ("hindsight__at_eval", True),
        ("hindsight__library", None),
        ("hindsight__api_timeout_s", 0.0),
        ("hindsight__api_workers", 0),
        ("hindsight__min_coverage_iterations", -1),
        ("adv__kind", "ppo"),
        ("adv__eps", 0.0),
        ("adv__penalty", -0.1),
        ("adv__penalty", "sometimes"),
        ("loss__clip_low", 1.0),
        ("loss__dual_clip", 1.0),
        ("loss__kl_coef", -0.01),
        ("distill__gate", "soft"),
        ("distill__kind", "kl"),
        ("distill__teacher", "other"),
        ("distill__span", "plan"),
        ("distill__value", "gap"),
        ("distill__value", 0.5),
        ("distill__hide_places", "yes"),
        ("distill__schedule", "cosine"),
        ("distill__ema_rate", 0.0),
        ("distill__mix", 1.5),
        ("distill__threshold", "high"),
        ("distill__top_k", 0),
        ("distill__schedule_patience", 0),
        ("adv__shape", "turn_mult"),
        ("adv__shape_signal", "row"),
        ("adv__shape_value", "reward"),
        ("adv__history_power", -1.0),
        ("distill__span_weight", -1.0),
        ("hindsight__granularity", "turn"),
        ("hindsight__step_skills", 0),
        ("hindsight__teach_readers", "yes"),
        ("loss__gen_coef", -0.1),
        ("loss__gen_reward", "won"),
        ("adv__shape_clip", 1.0),
        ("adv__gamma", 1.1),
        ("adv__overlong_buffer", -1),
        ("loss__kind", "vpg"),
        ("loss__aggregation", "mean"),
        ("loss__kl_type", "k4"),
        ("loss__importance_cap", -1.0),
        ("rollout__group_filter", "all"),
        ("rollout__max_rounds", 0),
        ("log__grad_norms_every", -1),
        ("distill__coef", float("inf")),
        ("optim__lr", "fast"),
        ("optim__lr", 0.0),
        ("optim__b2", 1.0),
        ("pack__rows_per_micro", 0),
        ("eval__split", "test"),
        ("eval__teacher_games", -1),
        ("eval__teacher_games", 2.5),
        ("eval__temperatures", ()),
        ("eval__temperatures", (0.0, -1.0)),
        ("checkpoint__keep", 0),
        ("log__tensorboard", 1),
    ],
)
def test_impossible_value_names_field_and_value(field, value):
    (problem,) = problems(make_config(**{field: value}))
    shown = list(value) if isinstance(value, tuple) else value
    assert problem.startswith(f"{field.replace('__', '.')} = {shown!r}: must be ")


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"rollout__group": 1}, ["adv.kind", "rollout.group"]),
        ({"rollout__thinking": "off"}, ["rollout.thinking = 'off'", "rollout.require_think = True"]),
        ({"env__train_tasks": 8}, ["env.train_tasks = 8", "rollout.tasks = 16"]),
        ({"hindsight__source": "none"}, ["distill.kind", "hindsight.source", "distill.kind = 'none'"]),
        ({"distill__kind": "none"}, ["hindsight.source", "distill.kind"]),
        ({"hindsight__at_rollout": 0.5}, ["hindsight.at_rollout = 0.5", "hindsight.source = 'self_hindsight'"]),
        ({"hindsight__at_eval": "both"}, ["hindsight.at_eval = 'both'", "hindsight.source = 'self_hindsight'"]),
        ({**LIBRARY, "hindsight__at_rollout": 1.0}, ["hindsight.at_rollout = 1.0", "distill.kind = 'gap_nll'"]),
        ({**LIBRARY, "hindsight__library": ""}, ["hindsight.source = 'static_library'", "hindsight.library = ''"]),
        ({"hindsight__source": "external_hindsight"}, ["hindsight.api_url = ''", "hindsight.api_model = ''"]),
        (
            {"hindsight__source": "none", "distill__kind": "none", "hindsight__control": "placebo"},
            ["hindsight.control = 'placebo'", "hindsight.source = 'none'"],
        ),
        (
            {**LIBRARY, "hindsight__control": "wrong_skill", "hindsight__retrieval": "all"},
            ["hindsight.control = 'wrong_skill'", "hindsight.retrieval = 'all'"],
        ),
        (
            {**LIBRARY, "hindsight__control": "placebo", "hindsight__retrieval": "keyword_full_prompt"},
            ["hindsight.control = 'placebo'", "hindsight.retrieval = 'keyword_full_prompt'"],
        ),
        (
            {**LIBRARY, "hindsight__at_rollout": 0.5, "pack__row_tokens": 2815},
            ["pack.row_tokens = 2815", "hindsight.max_skill_tokens = 256", "hindsight.at_rollout = 0.5"],
        ),
        ({"loss__rl_coef": 0.0, "distill__coef": 0.0}, ["loss.rl_coef", "distill.coef"]),
        ({"adv__kind": "zero", "distill__coef": 0.0}, ["adv.kind = 'zero'", "distill.coef = 0.0"]),
        ({"adv__kind": "drgrpo"}, ["adv.kind = 'drgrpo'", "adv.normalize = 'std'"]),
        ({"adv__kind": "rloo"}, ["adv.kind = 'rloo'", "adv.normalize = 'std'"]),
        (
            {"adv__shape": "add_gap", "hindsight__source": "none", "distill__kind": "none"},
            ["adv.shape = 'add_gap'", "hindsight.source = 'none'"],
        ),
        ({"loss__kind": "gspo"}, ["loss.kind = 'gspo'", "loss.aggregation = 'token_mean'"]),
        (
            {"loss__kind": "gspo", "loss__aggregation": "seq_mean_token_mean", "adv__shape": "mult_clip"},
            ["loss.kind = 'gspo'", "adv.shape = 'mult_clip'", "gspo_token"],
        ),
        ({"loss__importance_cap": 2.0, "old_logprobs": "sampler"}, ["loss.importance_cap", "old_logprobs"]),
        ({"distill__gate": "outcome", "adv__kind": "zero"}, ["distill.gate = 'outcome'", "adv.kind = 'zero'"]),
        (
            {"distill__schedule": "linear", "distill__schedule_start": 9, "distill__schedule_stop": 9},
            ["distill.schedule = 'linear'", "schedule_start = 9", "schedule_stop = 9"],
        ),
        (
            {"distill__schedule": "window", "distill__kind": "none", "hindsight__source": "none"},
            ["distill.schedule = 'window'", "distill.kind = 'none'"],
        ),
        (
            {**LIBRARY, "hindsight__granularity": "step"},
            ["hindsight.granularity = 'step'", "hindsight.source = 'static_library'"],
        ),
        (
            {"hindsight__source": "peer_success", "adv__kind": "zero", "rollout__group": 1},
            ["hindsight.source = 'peer_success'", "rollout.group = 1"],
        ),
        (
            {"hindsight__source": "env_feedback", "env__observation": "image"},
            ["hindsight.source = 'env_feedback'", "env.observation = 'image'"],
        ),
        (
            {**LIBRARY, "hindsight__second_attempts": 0.25},
            ["hindsight.second_attempts = 0.25", "hindsight.source = 'static_library'"],
        ),
        (
            {"hindsight__second_attempts": 0.25, "hindsight__source": "none", "distill__kind": "none"},
            ["hindsight.second_attempts = 0.25", "hindsight.source = 'none'"],
        ),
        (
            {"hindsight__second_attempts": 0.9},  # 7 of 8
            ["hindsight.second_attempts = 0.9", "rollout.group = 8", "adv.kind = 'grpo'"],
        ),
        (
            {"hindsight__second_attempts": 0.01, "rollout__group": 1, "adv__kind": "reinforce_pp"},  # there is one
            ["hindsight.second_attempts = 0.01", "rollout.group = 1"],
        ),
        (
            {"hindsight__second_attempts": 0.25, "rollout__group_filter": "dynamic"},
            ["hindsight.second_attempts = 0.25", "rollout.group_filter = 'dynamic'"],
        ),
        ({"hindsight__train_second": True}, ["hindsight.second_attempts = 0.0", "hindsight.train_second = True"]),
        ({"distill__value": "second_attempts"}, ["hindsight.second_attempts = 0.0", "distill.value"]),
        ({"loss__gen_reward": "second_attempts"}, ["hindsight.second_attempts = 0.0", "loss.gen_reward"]),
        (
            {"hindsight__second_attempts": 0.1, "hindsight__train_second": True},  # 1 of 8
            ["hindsight.train_second = True", "hindsight.second_attempts = 0.1", "rollout.group = 8"],
        ),
        (
            {"hindsight__second_attempts": 0.25, "hindsight__train_second": True, "pack__row_tokens": 2815},
            ["pack.row_tokens = 2815", "hindsight.max_skill_tokens = 256", "hindsight.train_second = True"],
        ),
        (
            {
                "hindsight__second_attempts": 0.25,
                "loss__gen_reward": "second_attempts",
                "hindsight__source": "group_reflection",
            },
            ["loss.gen_reward = 'second_attempts'", "hindsight.source = 'group_reflection'"],
        ),
        (
            {"distill__hide_places": True, "distill__span": "action", "distill__span_weight": 2.0},
            ["distill.hide_places = True", "distill.span_weight = 2.0"],
        ),
        (
            {**LIBRARY, "hindsight__control": "true_skill"},
            ["hindsight.control = 'true_skill'", "hindsight.source = 'static_library'"],
        ),
        (
            {"distill__schedule": "margin", "eval__teacher_games": 0},
            ["distill.schedule = 'margin'", "eval.teacher_games = 0"],
        ),
        ({"distill__schedule": "margin", "eval__every": 0}, ["distill.schedule = 'margin'", "eval.every = 0"]),
        (
            {"distill__schedule": "margin", "hindsight__source": "peer_success"},
            ["distill.schedule = 'margin'", "hindsight.source = 'peer_success'"],
        ),
        (
            {**LIBRARY, "distill__schedule": "margin", "hindsight__at_eval": "yes"},
            ["distill.schedule = 'margin'", "hindsight.at_eval = 'yes'"],
        ),
        ({"hindsight__teach_readers": True}, ["hindsight.teach_readers = True", "hindsight.at_rollout = 0.0"]),
        ({"distill__rows": "losing_view"}, ["distill.rows = 'losing_view'", "hindsight.teach_readers = False"]),
        ({"distill__span_weight": 2.0}, ["distill.span_weight = 2.0", "distill.span = 'all'"]),
        (
            {"adv__shape_signal": "turn", "distill__gap": "old"},
            ["adv.shape_signal = 'turn'", "adv.shape = 'none'"],
        ),
        (
            {"adv__shape": "add_gap", "adv__shape_value": "agreement"},
            ["adv.shape_value = 'agreement'", "distill.gap = 'current'"],
        ),
        (
            {**LIBRARY, "loss__gen_coef": 0.1, "hindsight__max_analysis_tokens": 1000},
            ["loss.gen_coef = 0.1", "hindsight.source = 'static_library'"],
        ),
        ({"loss__gen_coef": 0.1}, ["loss.gen_coef = 0.1", "pack.row_tokens", "max_analysis_tokens = 16384"]),
        (
            {
                "loss__gen_coef": 0.1,
                "hindsight__max_analysis_tokens": 2000,
                "hindsight__max_skill_tokens": 1100,
                "pack__teacher_row_tokens": 9000,
            },
            ["loss.gen_coef = 0.1", "pack.scored_tokens_per_row = 1024", "hindsight.max_skill_tokens = 1100"],
        ),
        ({"adv__overlong_buffer": 513}, ["adv.overlong_buffer = 513", "rollout.max_response_tokens = 512"]),
        ({"adv__normalize": "mean", "adv__std_floor": 1.0}, ["adv.normalize", "adv.std_floor"]),
        (
            {"pack__row_tokens": 2559},
            ["pack.row_tokens = 2559", "max_prompt_tokens = 2048", "max_response_tokens = 512"],
        ),
        ({"pack__scored_tokens_per_row": 511}, ["pack.scored_tokens_per_row", "rollout.max_response_tokens"]),
        ({"pack__teacher_row_tokens": 2815}, ["pack.teacher_row_tokens", "hindsight.max_skill_tokens"]),
        ({"mesh__tensor": -1}, ["mesh.fsdp", "mesh.tensor"]),
    ],
)
def test_impossible_combination_names_all_fields(overrides, fields):
    (problem,) = problems(make_config(**overrides))
    assert all(field in problem for field in fields)


@pytest.mark.parametrize(
    "overrides",
    [
        {"distill__coef": 0.0},  # must stay possible: it is compared with GRPO
        {"distill__kind": "none", "hindsight__source": "none", "pack__teacher_row_tokens": 1},
        {"loss__rl_coef": 0.0},
        {"loss__rl_coef": 1},
        {"pack__row_tokens": 2560},
        {"pack__teacher_row_tokens": 2816},
        LIBRARY,
        {**LIBRARY, "hindsight__at_rollout": 0.5, "pack__row_tokens": 2816},
        {**LIBRARY, "hindsight__at_rollout": 1.0, "hindsight__at_eval": "both", "distill__kind": "none"},
        {**LIBRARY, "hindsight__control": "placebo", "hindsight__retrieval": "all"},
        {"hindsight__control": "wrong_skill", "hindsight__retrieval": "all"},
        {"hindsight__control": "true_skill"},
        {"hindsight__second_attempts": 0.75},  # two first attempts remain
        {"hindsight__second_attempts": 0.01},
        {"hindsight__second_attempts": 0.5, "rollout__group": 2, "adv__kind": "reinforce_pp"},
        {"hindsight__second_attempts": 0.25, "hindsight__train_second": True, "distill__kind": "none"},
        {"hindsight__second_attempts": 0.25, "hindsight__train_second": True, "pack__row_tokens": 2816},
        {"hindsight__second_attempts": 0.25, "pack__row_tokens": 2560},  # they are not trained
        {"hindsight__second_attempts": 0.25, "distill__value": "second_attempts"},
        {"hindsight__second_attempts": 0.25, "hindsight__source": "peer_success", "rollout__group_filter": "mask"},
        {"distill__hide_places": True},
        {"distill__hide_places": True, "distill__span": "action"},
        {"distill__schedule": "margin"},
        {**LIBRARY, "distill__schedule": "margin", "hindsight__at_eval": "both"},
        {"eval__teacher_games": 0, "eval__every": 0},
    ],
)
def test_possible_combinations_pass(overrides):
    config_lib.check(make_config(**overrides))


def test_second_attempts_and_skills_in_first_ones_exclude_each_other():
    """The skills of the one come from an analyzer, those of the other from a library: more than one rule says so."""
    found = problems(make_config(hindsight__second_attempts=0.25, hindsight__at_rollout=0.5))
    (clash,) = [problem for problem in found if "first attempts are played without a skill" in problem]
    assert "hindsight.second_attempts = 0.25" in clash and "hindsight.at_rollout = 0.5" in clash


def test_warnings():
    assert config_lib.warnings(make_config()) == []
    (warning,) = config_lib.warnings(make_config(distill__gate="const"))
    assert "distill.kind = 'gap_nll', distill.gate = 'const'" in warning
    (warning,) = config_lib.warnings(make_config(distill__gate="outcome"))
    assert "distill.gate = 'outcome'" in warning and "'score' pushes it down" in warning
    assert config_lib.warnings(make_config(distill__gate="outcome", distill__kind="score")) == []
    (warning,) = config_lib.warnings(make_config(loss__kl_type="k1"))
    assert "loss.kl_type = 'k1'" in warning
    assert config_lib.warnings(make_config(loss__kl_type="k1", loss__kl_coef=0.0)) == []


def test_all_problems_in_one_message():
    config = make_config(optim__lr=-1.0, rollout__group=1, hindsight__source="none", iterations=0)
    assert len(problems(config)) == 4


def test_missing_and_unknown_fields():
    config = make_config(optim__lrr=1.0)
    with config.unlocked():
        del config.loss.kl_coef
    assert problems(config) == [
        "loss.kl_coef is missing: start from configs/base.py, which has every field",
        "unknown field optim.lrr; did you mean optim.lr?",
    ]


def test_suggest():
    config = base.get_config()
    assert config_lib.suggest(config, "optim.lrr") == "unknown field optim.lrr; did you mean optim.lr?"
    assert config_lib.suggest(config, "kl_coef") == "unknown field kl_coef; did you mean loss.kl_coef?"
    assert "adv.kind or distill.kind" in config_lib.suggest(config, "kind")
    assert config_lib.suggest(config, "qqq") == "unknown field qqq; configs/base.py lists all fields"


def test_hash_ignores_what_a_resumed_run_may_change():
    config = make_config()
    identity = config_lib.config_hash(config)
    free = make_config(iterations=3, eval__every=1, checkpoint__keep=9, log__tensorboard=False, env__workers=2)
    assert config_lib.config_hash(free) == identity
    assert config_lib.config_hash(make_config(optim__lr=2e-6)) != identity
    assert config_lib.config_hash(make_config(env__max_steps=31)) != identity
    for panel in ({"eval__games": 200}, {"eval__seed": 1}, {"eval__temperatures": (0.0,)}, {"eval__split": "unseen"}):
        assert config_lib.config_hash(make_config(**panel)) != identity, "evaluations of one run share a panel"
    assert config_lib.config_hash(json.loads(config_lib.to_json(config))) == identity


def test_json_is_stable_and_complete():
    config = make_config()
    reordered = ConfigDict(dict(reversed(list(config.to_dict().items()))))
    assert config_lib.to_json(config) == config_lib.to_json(reordered)
    assert config_lib.flatten(json.loads(config_lib.to_json(config))) == config_lib.flatten(config)


def test_diff():
    old, new = make_config(), make_config(optim__lr=2e-6, iterations=3)
    assert config_lib.diff(old, old) == []
    assert config_lib.diff(old, new) == ["iterations: 150 -> 3", "optim.lr: 1e-06 -> 2e-06"]
    assert config_lib.diff(old, new, ignore=config_lib.FREE_ON_RESUME) == ["optim.lr: 1e-06 -> 2e-06"]
    saved = json.loads(config_lib.to_json(old))
    assert config_lib.diff(saved, old) == []
    del saved["loss"]["kl_coef"]
    assert config_lib.diff(saved, old) == ["loss.kl_coef: (absent) -> 0.01"]


def test_mistyped_override_on_the_command_line(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "from absl import app\n"
        "from ml_collections import config_flags\n"
        "from seed_jax import config\n"
        "FLAG = config_flags.DEFINE_config_file('config')\n"
        "app.run(lambda _: print(FLAG.value.optim.lr), flags_parser=config.parse_flags)\n"
    )

    def launch(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), f"--config={ROOT}/configs/base.py", *overrides]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    assert launch("--config.optim.lr=2e-6").stdout == "2e-06\n"
    wrong = launch("--config.optim.lrr=1", "--config.optm.b1=0.5", "--config.seed=1")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines() == [
        "FATAL unknown field optim.lrr; did you mean optim.lr?",
        "FATAL unknown field optm.b1; did you mean optim.b1?",
    ]
