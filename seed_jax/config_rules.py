"""Combinations of a config's values that cannot work."""

from __future__ import annotations

from collections.abc import Callable

_LIBRARIES = ("static_library", "skill_bank")
_OF_GROUPS = ("group_reflection", "peer_success", "peer_feedback")
_ANEW = "keyword_full_prompt"
_GROUP_ESTIMATORS = ("grpo", "drgrpo", "rloo", "gigpo", "hgpo")


# Fields that exclude each other: (fields, whether their values clash, why and what to do).
COMBINATIONS: tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...] = (
    (
        ("adv.kind", "rollout.group"),
        lambda kind, group: kind in _GROUP_ESTIMATORS and group < 2,
        "a reward is compared inside its group, so a group needs 2 episodes or more",
    ),
    (
        ("rollout.thinking", "rollout.require_think"),
        lambda thinking, required: thinking == "off" and required,
        "the template ends the thought before the reply begins, so no reply would be valid; set "
        "rollout.require_think = False",
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
        (
            "hindsight.source",
            "distill.kind",
            "adv.shape",
            "hindsight.at_rollout",
            "hindsight.at_eval",
            "hindsight.second_attempts",
        ),
        lambda source, kind, shape, share, panel, again: (
            source != "none" and kind == "none" and shape == "none" and share == again == 0 and panel == "no"
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
        ("hindsight.source", "rollout.group"),
        lambda source, group: source in _OF_GROUPS and group < 2,
        "an episode learns from others of its group, which needs 2 or more; raise the second",
    ),
    (
        ("hindsight.source", "env.observation"),
        lambda source, seen: source in ("env_feedback", "peer_feedback") and seen == "image",
        "what the game answers is a picture, and a teacher would read it as text; set hindsight.source = "
        "'self_hindsight' or 'peer_success', or env.observation = 'text'",
    ),
    (
        ("hindsight.second_attempts", "hindsight.source"),
        lambda share, source: share > 0 and source in ("none", *_LIBRARIES),
        "a second attempt reads the skill that was written about a first one; set the first to 0.0 (a library's skills "
        "are read with hindsight.at_rollout), or hindsight.source = 'self_hindsight'",
    ),
    (
        ("hindsight.second_attempts", "rollout.group", "adv.kind"),
        lambda share, group, kind: (
            share > 0 and group - max(1, round(share * group)) < (2 if kind in _GROUP_ESTIMATORS else 1)
        ),
        "too few first attempts remain in a group (a reward is compared with those of 2 or more); lower the share or "
        "raise rollout.group",
    ),
    (
        ("hindsight.second_attempts", "rollout.group_filter"),
        lambda share, groups: share > 0 and groups == "dynamic",
        "second attempts are made of one round of tasks; set the second to 'off' or 'mask'",
    ),
    (
        ("hindsight.second_attempts", "hindsight.at_rollout"),
        lambda share, reads: share > 0 and reads > 0,
        "first attempts are played without a skill, to be compared with; set one of them to 0.0",
    ),
    (
        ("hindsight.second_attempts", "hindsight.train_second", "distill.value", "loss.gen_reward"),
        lambda share, trained, value, reward: share == 0 and (trained or "second_attempts" in (value, reward)),
        "there are no second attempts; set hindsight.second_attempts = 0.25",
    ),
    (
        ("hindsight.train_second", "hindsight.second_attempts", "rollout.group", "adv.kind"),
        lambda trained, share, group, kind: (
            trained and share > 0 and kind in _GROUP_ESTIMATORS and max(1, round(share * group)) < 2
        ),
        "second attempts are compared with one another, and each group has one; raise the second or rollout.group",
    ),
    (
        ("distill.hide_places", "distill.span_weight"),
        lambda hidden, weight: hidden and weight > 0,
        "the tokens outside the span still count, so nothing would be hidden; set distill.span_weight = 0.0",
    ),
    (
        ("hindsight.control", "hindsight.source"),
        lambda control, source: control == "true_skill" and source in _LIBRARIES,
        "a library's skills are not about single tasks; set hindsight.control = 'none' or another source",
    ),
    (
        ("distill.schedule", "eval.teacher_games", "eval.every"),
        lambda schedule, games, every: schedule == "margin" and (games == 0 or every == 0),
        "the margin is measured at evaluations; set eval.teacher_games and eval.every above 0",
    ),
    (
        ("distill.schedule", "hindsight.source", "hindsight.at_eval"),
        lambda schedule, source, panel: (
            schedule == "margin"
            and (source not in ("none", "self_hindsight", "ground_truth", *_LIBRARIES) or panel == "yes")
        ),
        "the margin is measured of skills about single episodes, against a panel played without; set hindsight.source "
        "= 'self_hindsight' and hindsight.at_eval = 'no', or distill.schedule = 'const'",
    ),
    (
        ("loss.gen_reward", "hindsight.source"),
        lambda reward, source: reward == "second_attempts" and source == "group_reflection",
        "second attempts are counted for the skill of one episode, not for that of a group; set loss.gen_reward = "
        "'gap', or hindsight.source = 'self_hindsight'",
    ),
    (
        ("loss.gen_coef", "hindsight.source", "distill.kind", "adv.shape"),
        lambda coef, source, kind, shape: (
            coef > 0 and (source not in ("self_hindsight", "group_reflection") or (kind == shape == "none"))
        ),
        "only skills that the policy writes itself, for a teacher, can be trained; set loss.gen_coef = 0.0",
    ),
    (
        ("loss.gen_coef", "pack.row_tokens", "hindsight.max_analysis_tokens", "hindsight.max_skill_tokens"),
        lambda coef, row, prompt, skill: coef > 0 and row < prompt + skill,
        "a row must hold an analysis; raise the second to the sum of the others, or lower these",
    ),
    (
        ("loss.gen_coef", "pack.scored_tokens_per_row", "hindsight.max_skill_tokens"),
        lambda coef, scored, skill: coef > 0 and scored < skill,
        "a row must score a whole analysis; raise the second to the third, or lower this",
    ),
    (
        ("loss.gen_coef", "env.observation", "pack.max_images_per_row", "env.max_steps", "hindsight.source"),
        lambda coef, seen, images, steps, source: (
            coef > 0 and seen == "image" and images < steps * (1 + (source == "group_reflection"))
        ),
        "a row must hold all images of an analysis, one a step of its episode or of both; raise the third",
    ),
    (
        ("hindsight.granularity", "hindsight.source"),
        lambda granularity, source: (
            granularity != "episode" and source not in ("none", "self_hindsight", "external_hindsight")
        ),
        "only an analyzer of single episodes writes skills for steps; set hindsight.granularity = 'episode'",
    ),
    (
        ("hindsight.teach_readers", "hindsight.at_rollout"),
        lambda teach, share: teach and not 0 < share < 1,
        "no episode is played with a skill, or every one; set the second to a share in between, or the first to False",
    ),
    (
        ("distill.rows", "hindsight.teach_readers"),
        lambda rows, teach: rows == "losing_view" and not teach,
        "both views need a teacher; set hindsight.teach_readers = True (and hindsight.at_rollout = 0.5)",
    ),
    (
        ("distill.span_weight", "distill.span"),
        lambda weight, span: weight > 0 and span == "all",
        "there are no tokens beside the span; set distill.span = 'action', or distill.span_weight = 0.0",
    ),
    (
        ("adv.shape_signal", "adv.shape_value", "adv.shape"),
        lambda signal, value, shape: shape == "none" and (signal, value) != ("token", "none"),
        "the advantage keeps its shape; set the first two to 'token' and 'none', or adv.shape = 'mult_clip'",
    ),
    (
        ("adv.shape_signal", "adv.shape_value", "distill.gap"),
        lambda signal, value, gap: gap != "old" and (signal, value) != ("token", "none"),
        "what looks at the whole batch is computed before any step; set distill.gap = 'old'",
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
            "hindsight.train_second",
        ),
        lambda row, prompt, skill, response, share, trained: (
            (share > 0 or trained) and prompt + response <= row < prompt + skill + response
        ),
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
        ("sft.row_tokens", "sft.scored_tokens_per_row"),
        lambda row, scored: row < scored,
        "a row cannot score more tokens than it has; lower the second",
    ),
    (
        ("mesh.fsdp", "mesh.tensor"),
        lambda fsdp, tensor: fsdp == -1 and tensor == -1,
        "only one of them can be 'all that is left'; give the other a number of devices",
    ),
)
