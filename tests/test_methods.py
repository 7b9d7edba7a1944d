"""Every preset is a working config with the factors that its publication names."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import alfworld, base, methods, quickstart
from seed_jax import config as config_lib
from seed_jax.hindsight.sources import load_library
from seed_jax.train.factors import choices, numbers

ROOT = Path(__file__).resolve().parents[1]
EVALUATED_ONLY = ("vanilla", "react", "skill_prompt")
EXTERNAL = ("skill_sd_paper", "opid")


def preset(method: str):
    config = alfworld.get_config(method)
    config.model.init = "some/directory"
    if method in EXTERNAL:
        config.hindsight.api_url, config.hindsight.api_model = "http://localhost:8000/v1", "writer"
    return config


@pytest.mark.parametrize("method", [m for m in methods.PRESETS if m not in EVALUATED_ONLY])
def test_presets_work(method):
    config = preset(method)
    config_lib.check(config)
    load_library(config.hindsight)
    assert config.method == method
    chosen = choices(config)
    assert chosen.needs_teacher == (config.distill.kind != "none" or config.adv.shape != "none")


@pytest.mark.parametrize("method", EVALUATED_ONLY)
def test_presets_that_cannot_train_say_so(method):
    with pytest.raises(config_lib.ConfigError, match=r"loss\.rl_coef = 0\.0.*this can only be evaluated"):
        config_lib.check(preset(method))


def factors(method: str) -> dict:
    values = config_lib.flatten(preset(method))
    names = ("hindsight.source", "hindsight.placement", "distill.teacher", "adv.kind", "adv.shape", "distill.kind")
    names += ("distill.gate", "loss.rl_coef", "distill.coef")
    shown = [values[name] for name in names]
    no_term = values["distill.kind"] == "none"
    return dict(
        zip(
            ("source", "placement", "teacher", "advantage", "shape", "distill", "gate", "rl", "coef"),
            shown,
            strict=True,
        )
    ) | ({"gate": None, "coef": 0} if no_term else {})


LIBRARY, HERE, BEFORE = "static_library", "after_task_line", "before_template"


@pytest.mark.parametrize(
    ("method", "source", "placement", "teacher", "advantage", "shape", "distill", "gate", "rl", "coef"),
    [
        ("opsd_repro", LIBRARY, BEFORE, "old", "zero", "none", "gap_nll", "sig_gap", 0, 0.01),
        ("opsd_paper", "ground_truth", "user_prefix", "frozen_init", "zero", "none", "topk_jsd", "none", 0, 1),
        ("grpo", "none", None, "old", "grpo", "none", "none", None, 1, 0),
        ("skill_grpo", LIBRARY, "user_prefix", "old", "grpo", "none", "none", None, 1, 0),
        ("grpo_opsd_repro", LIBRARY, BEFORE, "old", "grpo", "none", "gap_nll", "const", 1, 0.01),
        ("grpo_opsd_score", LIBRARY, BEFORE, "old", "grpo", "none", "score", "none", 1, 0.01),
        ("skill_sd_repro", LIBRARY, BEFORE, "old", "grpo", "none", "k3_is", "none", 1, 0.001),
        ("skill_sd_paper", "external_hindsight", "user_prefix", "old", "grpo", "none", "k3_is", "none", 1, 0.1),
        ("rlsd_repro", LIBRARY, BEFORE, "old", "grpo", "mult_clip", "none", None, 1, 0),
        ("rlsd_paper", "ground_truth", "user_prefix", "old", "grpo", "mult_clip", "none", None, 1, 0),
        ("sdar", LIBRARY, BEFORE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("opid", "external_hindsight", HERE, "old", "drgrpo", "add_gap", "none", None, 1, 0),
        ("sdpo", "peer_feedback", "user_prefix", "ema", "zero", "none", "topk_jsd", "none", 0, 1),
        ("seed", "self_hindsight", HERE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("seed_no_sft", "self_hindsight", HERE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("seed_no_opd", "none", None, "old", "grpo", "none", "none", None, 1, 0),
        ("seed_static_paper", LIBRARY, BEFORE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("seed_static_clean", LIBRARY, HERE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("seed_step", "self_hindsight", HERE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("seed_episode_step", "self_hindsight", HERE, "old", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
        ("ucob", "skill_bank", "user_prefix", "old", "gigpo", "none", "topk_fwd", "sig_gap", 1, 0.1),
        ("grsd", "group_reflection", HERE, "old", "grpo", "mult_clip", "none", None, 1, 0),
        ("agentopsd", LIBRARY, BEFORE, "old", "grpo", "mult_clip", "none", None, 1, 0),
        ("adrs", LIBRARY, BEFORE, "old", "grpo", "add_gap", "none", None, 1, 0),
        ("hgpo", "none", None, "old", "hgpo", "none", "none", None, 1, 0),
        ("seed_current", "self_hindsight", HERE, "current", "grpo", "none", "gap_nll", "sig_gap", 1, 0.01),
    ],
)
def test_factors_of_the_comparison(method, source, placement, teacher, advantage, shape, distill, gate, rl, coef):
    expected = dict(source=source, placement=placement, teacher=teacher, advantage=advantage, shape=shape)
    expected |= dict(distill=distill, gate=gate, rl=rl, coef=coef)
    got = factors(method)
    if placement is None:
        got["placement"] = None
    assert got == expected


def test_where_the_ablations_start():
    starts = {name: preset.init for name, preset in methods.PRESETS.items()}
    assert {name for name, init in starts.items() if init == "stage1"} == {
        "seed", "seed_plus", "seed_no_opd", "seed_static_clean", "seed_step", "seed_episode_step", "seed_current",
    }  # fmt: skip
    assert starts["seed_no_sft"] == starts["seed_static_paper"] == "base"


def test_numbers_of_single_methods():
    rlsd = preset("rlsd_repro")
    assert (rlsd.adv.shape_weight, rlsd.adv.shape_clip, rlsd.distill.gap) == (0.5, 0.2, "old")
    course = [float(numbers(rlsd, update)["shape"]) for update in (1, 50, 100, 150)]
    assert course == pytest.approx([0.495, 0.25, 0, 0])
    opid = preset("opid")
    assert (opid.adv.normalize, opid.adv.shape_weight, opid.distill.gap) == ("mean", 0.001, "old")
    dapo = preset("dapo")
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.kl_coef) == (0.2, 0.28, 0)
    assert (dapo.rollout.group_filter, dapo.adv.overlong_buffer) == ("dynamic", 102)
    gspo = preset("gspo")
    assert (gspo.loss.aggregation, gspo.loss.clip_low, gspo.loss.clip_high) == ("seq_mean_token_mean", 3e-4, 4e-4)
    assert preset("drgrpo").loss.aggregation == "seq_mean_token_sum_norm"
    ucob = preset("ucob")
    assert (ucob.distill.rows, ucob.distill.span, ucob.distill.span_weight) == ("losing_view", "action", 2)
    assert (ucob.distill.top_k, ucob.distill.support, ucob.hindsight.at_rollout) == (32, "renorm", 0.5)
    grsd, adrs, agentopsd = preset("grsd"), preset("adrs"), preset("agentopsd")
    assert (grsd.adv.shape_signal, grsd.adv.shape_clip, grsd.adv.shape_floor) == ("turn", 0.2, 0.1)
    assert (grsd.loss.gen_coef, grsd.hindsight.max_analysis_tokens) == (0.01, 4096 - 256)
    assert (agentopsd.adv.shape_signal, agentopsd.adv.shape_weight, agentopsd.adv.shape_clip) == ("running", 0.5, 0.2)
    assert (adrs.adv.shape_signal, adrs.adv.shape_value, adrs.distill.beta) == ("teacher", "agreement", 2)
    course = [float(numbers(adrs, update)["shape"]) for update in (20, 21, 70, 71)]
    assert course == pytest.approx([0, 0.02, 0.02, 0])
    assert [preset(name).hindsight.granularity for name in ("seed", "seed_step", "seed_episode_step", "opid")] == [
        "episode", "step", "episode_step", "episode_step",
    ]  # fmt: skip
    assert preset("serl").hindsight.source == "env_feedback" and preset("react").env.prompt == "react"
    assert (preset("sdpo").distill.top_k, preset("sdpo").distill.ema_rate) == (100, 0.05)
    assert preset("skill_grpo").hindsight.at_rollout == 1 and preset("skill_grpo").hindsight.at_eval == "both"


def test_the_published_settings_are_the_defaults():
    seed = preset("seed")
    assert config_lib.diff(seed, base.get_config()) == ["model.init: 'some/directory' -> ''"]


def test_a_preset_keeps_what_it_does_not_name():
    assert quickstart.get_config("seed").hindsight.max_skill_tokens == 40
    assert quickstart.get_config("grpo").adv.stat == "episodes"


def test_unknown_method():
    with pytest.raises(ValueError, match="method 'ppo' is unknown; choose one of adrs, agentopsd, "):
        methods.apply(base.get_config(), "ppo")
