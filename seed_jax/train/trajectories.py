"""Episodes for the trajectory page: every token of a sampled few, with its log-probs under each view of the prompt.

Views: the *student* reads the prompt as the policy did, the *teacher* reads the episode's skill in it, *wrong* the
skill of another task. A second attempt (train/second.py) has the first view only, with the skill that it was given. All
are scored under the weights before the update, in calls of one fixed shape beside it. The sample is small and chosen by
outcome; rates belong to metrics.jsonl, not to it.

With several processes the first one records what it has played itself; all score it together, since each holds a part
of the weights.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from seed_jax import images, png, sharding
from seed_jax import tokenizer as tok
from seed_jax.hindsight.analyzer import analyze
from seed_jax.runtime.logging import PANEL_TRAJECTORIES_FILE, TRAJECTORIES_FILE, append_jsonl
from seed_jax.spans import tag_span
from seed_jax.train import factors
from seed_jax.train.metrics import episode_facts, turn_facts
from seed_jax.train.packing import Sample
from seed_jax.train.scoring import score
from seed_jax.train.state import TrainState
from seed_jax.train.update import model_placement
from seed_jax.types import Episode

PANEL_STREAM = (1 << 29) + 2  # of the analyses of panel episodes, which training never makes
_ROWS = 16  # in one call, or one a device: a sample is small, padding it to a whole micro-batch would double the cost
_DIGITS = 3  # of a log-prob in the file, nats


def record_rollout(run, state: TrainState, iteration: int, episodes: Sequence[Episode]) -> None:
    """Appends some of an iteration's episodes (iteration counted from 0) to trajectories.jsonl, where it is due.
    episodes: those of this process, first and second attempts."""
    log = run.config.log
    due = log.trajectories_every and (iteration % log.trajectories_every == 0 or iteration + 1 == run.config.iterations)
    if due:
        scorer = Scorer(run, state) if run.distills else None
        chosen = pick_pairs(episodes, log.trajectories_per_iteration) if run.leads else []
        wrong = wrong_skills(chosen, episodes)
        _write(run, scorer, TRAJECTORIES_FILE, iteration + 1, chosen, wrong, run.setup.train_tasks)


def record_panel(run, state: TrainState, iteration: int, episodes: Sequence[Episode]) -> None:
    """Appends the same few panel games, as the weights after `iteration` updates play them, with the skills that these
    weights write about them, to trajectories_panel.jsonl. episodes: those that this process has played."""
    count = run.config.log.trajectories_panel
    if not count:
        return
    chosen = pick_panel(episodes, count) if run.leads else []
    if chosen and run.distills and run.skills.source != "external_hindsight":  # a service is not asked for a picture
        if run.skills.source == "self_hindsight":
            analyze(run.sampler, run.tokenizer, chosen, run.config.hindsight, run.config.env.prompt, PANEL_STREAM)
        run.skills.assign(chosen)
    scorer = Scorer(run, state) if run.distills else None
    if scorer:
        run.sampler.release()  # its memory is the scoring's, as it is the update's
    _write(run, scorer, PANEL_TRAJECTORIES_FILE, iteration, chosen, wrong_skills(chosen, chosen), run.setup.panel)
    if scorer:
        run.load_sampler(state)


def _write(run, scorer: Scorer | None, file: str, iteration: int, chosen, wrong, tasks: Sequence[Any]) -> None:
    scores = score_views(run, scorer, chosen, wrong) if scorer else {}
    by_id = {task.id: task for task in tasks}
    for place, episode in enumerate(chosen):
        record = trajectory(run.tokenizer, episode, wrong[place], {t: v for (e, t), v in scores.items() if e == place})
        for t, turn in enumerate(record["turns"]):
            turn["kind"] = run.setup.world.domain.row_class(by_id[episode.task_id], episode, t)
        append_jsonl(run.workdir / file, {"iteration": iteration, **record})


# -- which episodes ----------------------------------------------------------------------------------------------------


def pick_pairs(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """At most `count` played episodes: of groups spread over the iteration the first that won and the first that lost,
    or the first two where all ended alike.

    Of a group with second attempts these are, where they can be, ones that were tried again, and the second attempt of
    one of them comes behind it; such groups go before others.
    """
    played = [episode for episode in episodes if episode.turns and not episode.error]
    seconds = {episode.attempt_of: episode for episode in reversed(played) if episode.attempt_of is not None}
    groups: dict[int, list[Episode]] = defaultdict(list)
    for episode in played:
        if episode.attempt_of is None:
            groups[episode.group].append(episode)
    of_groups = [_of_group(members, seconds) for members in groups.values()]
    again = [some for some in of_groups if any(episode.attempt_of is not None for episode in some)]
    once = [some for some in of_groups if all(episode.attempt_of is None for episode in some)]
    wanted = -(-count // (3 if again else 2))
    spread = _spread(again, wanted)
    spread += _spread(once, wanted - len(spread))
    return [episode for some in spread for episode in some][:count]


def _of_group(members: Sequence[Episode], seconds: dict[int, Episode]) -> list[Episode]:
    """Two first attempts of a group and the second attempt at one of them, rather at one that lost. seconds: by the
    number of the first attempt."""
    members = sorted(members, key=lambda episode: episode.index not in seconds)
    first = {episode.won: episode for episode in reversed(members)}
    pair = [first[True], first[False]] if len(first) == 2 else members[:2]
    again = min((e for e in pair if e.index in seconds), key=lambda episode: episode.won, default=None)
    return [e for episode in pair for e in ([episode, seconds[episode.index]] if episode is again else [episode])]


def _spread(some: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spaced."""
    count = min(len(some), count)
    return [some[len(some) * i // count] for i in range(count)]


def pick_panel(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """`count` panel episodes, families in turn: the first of each, then the second of each, ..."""
    families: dict[str, int] = defaultdict(int)
    ranked = []
    for place, episode in enumerate(episodes):
        ranked.append((families[episode.family], place))
        families[episode.family] += 1
    return [episodes[place] for _, place in sorted(ranked)[:count] if episodes[place].turns]


def wrong_skills(chosen: Sequence[Episode], episodes: Sequence[Episode]) -> list[Any]:
    """For each chosen episode the skill of the next one (in order, from the start behind the last) with another goal
    and another text; None where there is none, and for a second attempt."""
    places = {id(episode): place for place, episode in enumerate(episodes)}
    found = []
    for episode in chosen:
        if episode.attempt_of is not None:
            found.append(None)
            continue
        start = places[id(episode)] + 1
        later = (episodes[i % len(episodes)] for i in range(start, start + len(episodes) - 1))
        mine = episode.skill.text if episode.skill else None
        found.append(
            next(
                (
                    e.skill
                    for e in later
                    if e.skill and e.skill.text and e.goal != episode.goal and e.skill.text != mine
                ),
                None,
            )
        )
    return found


# -- log-probs ---------------------------------------------------------------------------------------------------------


class Scorer:
    """Log-probs under the policy's weights and under those with which the update scores the teacher at its start.

    Weights stay where the training has them, and rows are split as in the update, a device or more each: what fits
    there fits here. With several processes all call it together, see `score`.
    """

    def __init__(self, run, state: TrainState):
        config, choices = run.config, factors.choices(run.config)
        teacher = state.teacher if choices.keeps_teacher else None
        teacher = state.reference if choices.teacher == "frozen_init" else teacher
        dtype, mesh, self.split = jnp.dtype(config.model.dtype), run.mesh, sharding.batch_sharding(run.mesh)
        self.weights = {"student": state.params, "teacher": state.params if teacher is None else teacher}
        self.spec, p, devices = run.spec, config.pack, mesh.shape["fsdp"]
        self.rows = devices * max(1, min(_ROWS, p.rows_per_micro) // devices)
        self.shape = run.shape._replace(row_tokens=p.teacher_row_tokens)
        attention, model_mesh = model_placement(config, run.spec, mesh)
        self.options = dict(dtype=dtype, attention=attention, mesh=model_mesh)

    def __call__(self, who: str, samples: Sequence[Sample]) -> list[np.ndarray]:
        return score(self.weights[who], self.spec, samples, self.shape, self.rows, self.split, **self.options)


def score_views(run, scorer: Scorer, chosen: Sequence[Episode], wrong) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """{(place of the episode, turn): {view: log-probs of the response tokens, [n] nats}}; views that do not exist (no
    skill, no room for it) are left out."""
    config, counts = run.config, Counter()
    limit = config.rollout.max_prompt_tokens + config.hindsight.max_skill_tokens
    other = [dataclasses.replace(episode, skill=skill) for episode, skill in zip(chosen, wrong, strict=True)]
    asked = {(e, t): turn.prompt_ids for e, episode in enumerate(chosen) for t, turn in enumerate(episode.turns)}
    prompts = {
        "student": asked,
        "teacher": run.skills.teacher_prompts(chosen, limit, counts),
        # A library that is searched anew for each prompt finds the right skill whatever it is given.
        "wrong": {} if run.skills.per_turn else run.skills.teacher_prompts(other, limit, counts),
    }
    result: dict[tuple[int, int], dict[str, np.ndarray]] = defaultdict(dict)
    for view, found in prompts.items():
        turns = [chosen[e].turns[t] for e, t in found]
        samples = [
            Sample(ids, turn.response_ids, images=images.shown([turn]))
            for ids, turn in zip(found.values(), turns, strict=True)
        ]
        for key, values in zip(found, scorer("student" if view == "student" else "teacher", samples), strict=True):
            result[key][view] = values
    return result


# -- records -----------------------------------------------------------------------------------------------------------


def trajectory(tokenizer, episode: Episode, wrong, scores: dict[int, dict[str, np.ndarray]]) -> dict[str, Any]:
    """An episode as JSON. Each of `tokens` has its text (their concatenation is the reply, special tokens included) and
    a log-prob in each view; without `scores` the sampler's own are the student's. thought, action: [start, stop) of the
    tokens inside the tags. A turn's skill: what the teacher reads there, in a second attempt the policy."""
    skill = episode.skill if episode.attempt_of is None else episode.given

    def turn_record(number: int) -> dict[str, Any]:
        turn = episode.turns[number]
        views = scores.get(number) or {"student": turn.logprobs}
        spans = {
            name: tag_span(tokenizer, turn.response_ids, tag)
            for name, tag in (("thought", "think"), ("action", "action"))
        }
        return {
            **turn_facts(turn),
            **({} if turn.image is None else {"image": png.thumbnail_uri(turn.image)}),
            "skill": skill.at(number) if skill else None,
            "tokens": tok.token_texts(tokenizer, turn.response_ids),
            **{view: [round(float(x), _DIGITS) for x in values] for view, values in views.items()},
            **{name: [span.start, span.stop] for name, span in spans.items() if span.stop},
        }

    turns = [turn_record(number) for number in range(len(episode.turns))]
    return {**episode_facts(episode), "wrong_skill": wrong.text if wrong else None, "turns": turns}
