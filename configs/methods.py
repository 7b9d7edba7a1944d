"""Methods as presets of factors: a method is a few values of the config, not a code path.

Only what makes the method is set; everything else (group statistics, coefficients a preset does not name, sizes) stays
as the environment's config has it. "seed" and "grpo" in configs/alfworld.py are the published settings.
`python -m configs.methods` prints the table of the README.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Preset(NamedTuple):
    """about: where it comes from; init: the weights it starts from, "base" model or "stage1" (after hindsight-skill
    SFT), to be named in model.init; values: field -> value, or a function of the config so far."""

    about: str
    init: str
    values: Mapping[str, Any]


_ALONE = {"hindsight.source": "none", "distill.kind": "none"}
_SELF = {"hindsight.source": "self_hindsight"}
_LIBRARY = {
    "hindsight.source": "static_library",
    "hindsight.retrieval": "task_type",
    "hindsight.placement": "before_template",
}
_IN_PROMPT = {"hindsight.placement": "user_prefix", "distill.kind": "none"}
_EXTERNAL = {"hindsight.source": "external_hindsight"}
_STEPWISE = {"hindsight.granularity": "episode_step"}
_AS_SEED = {"distill.kind": "gap_nll", "distill.gate": "sig_gap"}
_SDAR = {**_LIBRARY, **_AS_SEED, "distill.beta": 5.0, "distill.coef": 0.01}
_EVALUATED = {**_ALONE, "loss.rl_coef": 0.0}
_NO_REWARD = {"adv.kind": "zero", "loss.rl_coef": 0.0}
_SHAPED = {"distill.kind": "none", "distill.gap": "old"}
_MULTIPLIED = {**_SHAPED, "adv.shape": "mult_clip", "adv.shape_weight": 0.5, "adv.shape_clip": 0.2}
_RLSD = {
    **_MULTIPLIED,
    "distill.schedule": "linear",
    "distill.schedule_start": 0,
    "distill.schedule_end": 0.0,
}
_LIKELIEST = {
    **_NO_REWARD,
    "hindsight.placement": "user_prefix",
    "distill.kind": "topk_jsd",
    "distill.top_k": 100,
    "distill.support": "tail",
    "distill.mix": 0.5,
    "distill.gate": "none",
    "distill.coef": 1.0,
}
_MEAN_ONLY = {"adv.normalize": "mean", "adv.std_floor": 0.0}
_CLIP_HIGHER = {"loss.clip_low": 0.2, "loss.clip_high": 0.28}
_DYNAMIC = {"rollout.group_filter": "dynamic", "rollout.max_rounds": 10}


def _fifth_of_a_reply(config: ConfigDict) -> int:
    return config.rollout.max_response_tokens // 5


def _analysis_in_a_row(config: ConfigDict) -> int:
    """Of longer episodes the middle is left out."""
    room = config.pack.row_tokens - config.hindsight.max_skill_tokens
    return min(config.hindsight.max_analysis_tokens, room)


PRESETS = {
    # -- the comparison of arXiv 2607.14777, table 1, and its ablations
    "vanilla": Preset("the policy as it is; evaluated, not trained", "base", _EVALUATED),
    "react": Preset(
        "the policy with a transcript as its prompt (arXiv 2210.03629); evaluated, not trained",
        "base",
        {**_EVALUATED, "env.prompt": "react"},
    ),
    "skill_prompt": Preset(
        "the policy with skills in its prompt; evaluated, not trained",
        "base",
        {
            **_IN_PROMPT,
            "hindsight.source": "static_library",
            "hindsight.retrieval": "keyword",
            "hindsight.at_eval": "yes",
            "loss.rl_coef": 0.0,
        },
    ),
    "opsd_repro": Preset(
        "OPSD as in the published tables: gated distillation without reward", "base", {**_SDAR, **_NO_REWARD}
    ),
    "opsd_paper": Preset(
        "OPSD (arXiv 2601.18734) over the likeliest tokens: the teacher sees the solution",
        "base",
        {
            **_LIKELIEST,
            "hindsight.source": "ground_truth",
            "distill.teacher": "frozen_init",
            "loss.kl_coef": 0.0,
            "loss.entropy_coef": 0.0,
        },
    ),
    "grpo": Preset("GRPO (arXiv 2402.03300): no analyzer, no teacher", "base", _ALONE),
    "skill_grpo": Preset(
        "GRPO with skills in the prompt; evaluated without and with them",
        "base",
        {
            **_IN_PROMPT,
            "hindsight.source": "static_library",
            "hindsight.retrieval": "keyword",
            "hindsight.at_rollout": 1.0,
            "hindsight.at_eval": "both",
        },
    ),
    "grpo_opsd_repro": Preset(
        "GRPO+OPSD as released: a constant gate, so a gradient without the teacher",
        "base",
        {**_LIBRARY, "distill.kind": "gap_nll", "distill.gate": "const", "distill.coef": 0.01},
    ),
    "grpo_opsd_score": Preset(
        "GRPO+OPSD as described: reverse KL to the teacher",
        "base",
        {**_LIBRARY, "distill.kind": "score", "distill.gate": "none", "distill.coef": 0.01},
    ),
    "skill_sd_repro": Preset(
        "Skill-SD as in the published tables",
        "base",
        {**_LIBRARY, "distill.kind": "k3_is", "distill.gate": "none", "distill.coef": 0.001},
    ),
    "skill_sd_paper": Preset(
        "Skill-SD (arXiv 2604.10674): another model's summary of the episode",
        "base",
        {
            **_EXTERNAL,
            "hindsight.placement": "user_prefix",
            "distill.kind": "k3_is",
            "distill.gate": "none",
            "distill.coef": 0.1,
        },
    ),
    "rlsd_repro": Preset(
        "RLSD as in the published tables", "base", {**_LIBRARY, **_RLSD, "distill.schedule_stop": 100}
    ),
    "rlsd_paper": Preset(
        "RLSD (arXiv 2604.03128): the teacher sees the solution",
        "base",
        {
            **_RLSD,
            "hindsight.source": "ground_truth",
            "hindsight.placement": "user_prefix",
            "distill.schedule_stop": 50,
        },
    ),
    "sdar": Preset("SDAR (arXiv 2605.15155)", "base", _SDAR),
    "opid": Preset(
        "OPID (arXiv 2606.26790): skills of critical steps, of the episode elsewhere",
        "base",
        {
            **_EXTERNAL,
            **_STEPWISE,
            **_MEAN_ONLY,
            **_SHAPED,
            "hindsight.placement": "after_task_line",
            "adv.kind": "drgrpo",
            "adv.shape": "add_gap",
            "adv.shape_weight": 0.001,
        },
    ),
    "seed": Preset("SEED (arXiv 2607.14777)", "stage1", {**_SELF, **_AS_SEED}),
    "seed_plus": Preset(
        "SEED with the teacher's likeliest tokens as targets, as far as the teacher is ahead (docs/results.md)",
        "stage1",
        {
            **_SELF,
            "distill.kind": "topk_fwd",
            "distill.top_k": 100,
            "distill.support": "tail",
            "distill.gate": "none",
            "distill.coef": 1.0,
            "distill.schedule": "margin",
            "distill.hide_places": True,
        },
    ),
    "seed_no_sft": Preset("ablation of SEED: from the base model", "base", {**_SELF, **_AS_SEED}),
    "seed_no_opd": Preset("ablation of SEED: GRPO from stage 1", "stage1", _ALONE),
    "seed_static_paper": Preset("ablation of SEED as published: SDAR", "base", _SDAR),
    "seed_static_clean": Preset(
        "ablation of SEED: only the source of skills differs",
        "stage1",
        {
            **_AS_SEED,
            "hindsight.source": "static_library",
            "hindsight.retrieval": "task_type",
            "hindsight.placement": "after_task_line",
        },
    ),
    "seed_step": Preset(
        "SEED with skills for single steps only",
        "stage1",
        {**_SELF, **_AS_SEED, "hindsight.granularity": "step"},
    ),
    "seed_episode_step": Preset(
        "SEED with skills for single steps, and that of the episode elsewhere",
        "stage1",
        {**_SELF, **_AS_SEED, **_STEPWISE},
    ),
    "seed_current": Preset(
        "SEED with the teacher of its algorithm 1: the moving weights",
        "stage1",
        {**_SELF, **_AS_SEED, "distill.teacher": "current"},
    ),
    # -- peers
    "rloo": Preset("RLOO (arXiv 2402.14740)", "base", {**_ALONE, **_MEAN_ONLY, "adv.kind": "rloo"}),
    "reinforce": Preset(
        "REINFORCE with RLOO's baseline",
        "base",
        {**_ALONE, **_MEAN_ONLY, "adv.kind": "rloo", "loss.kind": "reinforce"},
    ),
    "reinforce_pp": Preset("REINFORCE++ (arXiv 2501.03262)", "base", {**_ALONE, "adv.kind": "reinforce_pp"}),
    "drgrpo": Preset(
        "Dr. GRPO (arXiv 2503.20783)",
        "base",
        {**_ALONE, **_MEAN_ONLY, "adv.kind": "drgrpo", "loss.aggregation": "seq_mean_token_sum_norm"},
    ),
    "dapo": Preset(
        "DAPO (arXiv 2503.14476)",
        "base",
        {
            **_ALONE,
            **_CLIP_HIGHER,
            **_DYNAMIC,
            "adv.overlong_buffer": _fifth_of_a_reply,
            "adv.overlong_penalty": 1.0,
            "loss.kl_coef": 0.0,
        },
    ),
    "gspo": Preset(
        "GSPO (arXiv 2507.18071)",
        "base",
        {
            **_ALONE,
            "loss.kind": "gspo",
            "loss.aggregation": "seq_mean_token_mean",
            "loss.clip_low": 3e-4,
            "loss.clip_high": 4e-4,
        },
    ),
    "gigpo": Preset("GiGPO (arXiv 2505.10978)", "base", {**_ALONE, "adv.kind": "gigpo"}),
    "hgpo": Preset(
        "HGPO: GiGPO at every length of shared history",
        "base",
        {**_ALONE, "adv.kind": "hgpo"},
    ),
    "gigpo_dynamic": Preset(
        "GiGPO with DAPO's filter and clip range", "base", {**_ALONE, **_CLIP_HIGHER, **_DYNAMIC, "adv.kind": "gigpo"}
    ),
    "skillrl": Preset(
        "SkillRL (arXiv 2602.08234) with a bank that does not grow",
        "base",
        {**_IN_PROMPT, "hindsight.source": "skill_bank", "hindsight.at_rollout": 1.0, "hindsight.at_eval": "yes"},
    ),
    "sdpo": Preset(
        "SDPO (arXiv 2601.20802): the teacher sees a successful peer and what the environment answered",
        "base",
        {**_LIKELIEST, "hindsight.source": "peer_feedback", "distill.teacher": "ema", "distill.ema_rate": 0.05},
    ),
    "serl": Preset(
        "SERL (arXiv 2605.19447): the teacher sees what the environment answered",
        "base",
        {
            **_RLSD,
            "hindsight.source": "env_feedback",
            "distill.schedule_stop": 50,
            "distill.span": "action",
            "distill.teacher": "periodic",
            "distill.refresh_every": 10,
            "loss.kl_coef": 0.0,
        },
    ),
    "ucob": Preset(
        "UCOB (arXiv 2606.29502) with a bank that does not grow: of two views, with and without a skill, the better "
        "teaches the other",
        "base",
        {
            "hindsight.source": "skill_bank",
            "hindsight.placement": "user_prefix",
            "hindsight.at_rollout": 0.5,
            "hindsight.teach_readers": True,
            "adv.kind": "gigpo",
            "distill.kind": "topk_fwd",
            "distill.top_k": 32,
            "distill.support": "renorm",
            "distill.gate": "sig_gap",
            "distill.beta": 5.0,
            "distill.rows": "losing_view",
            "distill.span": "action",
            "distill.span_weight": 2.0,
            "distill.coef": 0.1,
        },
    ),
    "grsd": Preset(
        "GRSD (arXiv 2607.28076): gaps of whole turns against the group's, skills from groups with both outcomes",
        "base",
        {
            **_MULTIPLIED,
            "hindsight.source": "group_reflection",
            "adv.shape_signal": "turn",
            "adv.shape_floor": 0.1,
            "adv.shape_weight": 1.0,
            "loss.gen_coef": 0.01,
            "hindsight.min_coverage_iterations": 0,  # a weak policy may have no mixed group for a while
            "hindsight.max_analysis_tokens": _analysis_in_a_row,
        },
    ),
    "agentopsd": Preset(
        "AgentOPSD (arXiv 2608.05987): gaps of turns, added up over the episode",
        "base",
        {**_LIBRARY, **_MULTIPLIED, "adv.shape_signal": "running"},
    ),
    "adrs": Preset(
        "ADRS (arXiv 2608.03223): the teacher's preferences, as far as agreeing with it pays in the group",
        "base",
        {
            **_LIBRARY,
            **_SHAPED,
            "adv.shape": "add_gap",
            "adv.shape_signal": "teacher",
            "adv.shape_value": "agreement",
            "adv.shape_weight": 0.02,
            "distill.beta": 2.0,
            "distill.schedule": "window",
            "distill.schedule_start": 21,
            "distill.schedule_stop": 70,
        },
    ),
}


def apply(config: ConfigDict, method: str) -> ConfigDict:
    """Sets the factors of `method` in place and returns the config."""
    if method not in PRESETS:
        raise ValueError(f"method {method!r} is unknown; choose one of {', '.join(sorted(PRESETS))}")
    for name, value in PRESETS[method].values.items():
        *sections, field = name.split(".")
        node = config
        for section in sections:
            node = node[section]
        node[field] = value(config) if callable(value) else value
    config.method = method
    return config


def table() -> str:
    """The presets as a Markdown table: method -> factors."""
    lines = ["| method | what it is | starts from | factors |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        factors = ", ".join(f"{field}={_shown(value)}" for field, value in preset.values.items())
        lines.append(f"| `{name}` | {preset.about} | {preset.init} | {factors} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return value.__name__.strip("_").replace("_", " ") if callable(value) else str(value)


if __name__ == "__main__":
    print(table())
