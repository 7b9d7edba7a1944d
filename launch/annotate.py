"""Stage 1, the data: episodes of a policy, skills written about them, and the rows that launch.sft trains on.

python -m launch.annotate --config=configs/alfworld.py --config.model.init=DIR --stage=rollouts --out=data/stage1
python -m launch.annotate --config=... --config.hindsight.api_url=URL --config.hindsight.api_model=NAME \\
    --stage=skills --out=data/stage1
python -m launch.annotate --config=... --config.model.init=DIR --stage=following --out=data/stage1   (optional)
python -m launch.annotate --config=... --stage=dataset --out=data/stage1

rollouts: plays config.annotate.tasks training tasks, several times each, with the model in model.init, or with one
behind a chat service (--server=http://HOST/v1 --served_model=NAME). skills: config.annotate.writer says who writes.
following: every task is played once more by the model in model.init for each skill about it, with that skill in the
prompt; the report says whether it wins more often so. dataset: the split by task and the mix with acting rows, and with
config.annotate.following turns of won episodes that had a skill in the prompt. Every stage goes on where it was
stopped; each leaves a report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from launch import common
from launch.environment import open_world, tasks_of
from launch.stage1_episodes import collect, follow
from seed_jax import config as config_lib
from seed_jax import tokenizer as tok
from seed_jax.hindsight import annotate, dataset, pictures
from seed_jax.hindsight import records as records_lib
from seed_jax.hindsight.client import Client
from seed_jax.hindsight.prompts import TEXT_PLACEMENTS, fit_analyses
from seed_jax.images import shown
from seed_jax.models import hf
from seed_jax.runtime.logging import append_jsonl, jsonable, write_whole
from seed_jax.runtime.terminal import Countdown
from seed_jax.types import Episode, Skill

STAGES = ("rollouts", "skills", "following", "dataset")
SECTIONS = ("env", "rollout", "hindsight", "annotate", "mesh", "model", "seed")  # of the config, as far as it is read
SKILL_FIELDS = (  # what skills depend on, beside the writer's model
    "annotate.writer",
    "annotate.max_tokens",
    "annotate.leaks",
    "env.prompt",
    "hindsight.max_analysis_tokens",
    "hindsight.max_skill_tokens",
    "hindsight.min_words",
)
SAY_EVERY_S = 10.0  # between lines about how far the skills are

_CONFIG = config_flags.DEFINE_config_file("config", None, "config file, with the method after a colon")
_STAGE = flags.DEFINE_enum("stage", None, STAGES, "what to make, in this order; following may be left out")
_OUT = flags.DEFINE_string("out", None, "directory of the files; earlier ones of the same settings are completed")
_SERVER = flags.DEFINE_string("server", None, "rollouts: address of a chat service that plays, up to /v1")
_SERVED_MODEL = flags.DEFINE_string("served_model", None, "rollouts: the model's name at --server")

INPUT_ERRORS = (*common.INPUT_ERRORS, records_lib.RecordError)


def main(_) -> int:
    config, stage, out = _CONFIG.value, _STAGE.value, Path(_OUT.value).expanduser()
    try:
        _check(config, stage)
        common.prepare_process([config])
        with records_lib.alone_in(out):
            result = _STAGE_OF[stage](config, out)
    except (*INPUT_ERRORS, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    except common.RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return common.EXIT_INTERRUPTED
    text = json.dumps(jsonable(result), indent=1)
    write_whole(out / f"report_{stage}.json", text + "\n")
    print(text)
    if result.get("missing"):
        print(f"{result['missing']} episodes are missing; the same command tries them again", file=sys.stderr)
        return common.EXIT_FAILED
    return 0


def _check(config, stage: str) -> None:
    """Raises one of INPUT_ERRORS for what can be known before anything is loaded."""
    if _SERVER.value and stage == "following":
        raise config_lib.ConfigError(
            "--server with --stage=following: the model in model.init plays, which is the one that will be trained; "
            "leave out --server"
        )
    with config.unlocked():
        config.hindsight.source, config.hindsight.control = "self_hindsight", "none"  # no library is read here
        config.eval.teacher_games = int(stage == "following")  # whether the sampler's slots have room for a skill
        if _SERVER.value and stage == "rollouts":
            config.model.init = config.model.init or "(served)"
    config_lib.check(config, ("annotate", "seed", "env") if stage == "dataset" else SECTIONS)
    if _SERVER.value and not _SERVED_MODEL.value:
        raise config_lib.ConfigError("--server needs --served_model=NAME, the model's name at that service")
    if _SERVER.value and config.env.observation == "image" and config.model.init == "(served)":
        raise config_lib.ConfigError(
            "--server with env.observation = 'image': name the directory of the served model in model.init too; its "
            "config.json says at which size it reads images"
        )
    h = config.hindsight
    if stage == "skills" and config.annotate.writer == "openai" and not (h.api_url and h.api_model):
        raise config_lib.ConfigError(
            f"annotate.writer = 'openai', hindsight.api_url = {h.api_url!r}, hindsight.api_model = {h.api_model!r}: "
            "name the service and its model in the last two, or set annotate.writer = 'policy' or 'planner'"
        )


# -- skills ------------------------------------------------------------------------------------------------------------


def write_skills(config, out: Path) -> dict[str, Any]:
    """Appends a line for every episode that has none; returns the report on all lines."""
    a, h = config.annotate, config.hindsight
    settings = {field: config_lib.flatten(config)[field] for field in SKILL_FIELDS}
    settings["model"] = {"openai": h.api_model, "policy": config.model.init, "planner": None}[a.writer]
    rollouts = out / records_lib.ROLLOUTS_FILE
    if not rollouts.exists():
        raise records_lib.RecordError(f"{rollouts} does not exist; make it with launch.annotate --stage=rollouts")
    records_lib.check_settings(out, "skills", settings)
    path = out / records_lib.SKILLS_FILE
    records_lib.mend(path)
    played = [record for record in records_lib.read_records(rollouts) if record["turns"]]
    done = {line["episode"] for line in records_lib.read_records(path)}
    todo = [record for record in played if record["episode"] not in done]
    if todo:
        read_image = pictures.Reader(out)
        episodes = [records_lib.to_episode(record, index, read_image) for index, record in enumerate(todo)]
        tokenizer, ask = _writer(config, out, episodes)
        try:
            prompts = fit_analyses(tokenizer, episodes, config.env.prompt, h.max_analysis_tokens)
        except ValueError as error:
            raise config_lib.ConfigError(str(error)) from error

        def too_long(skill: Skill) -> bool:
            return len(tok.encode_response(tokenizer, records_lib.skill_answer(skill))) > h.max_skill_tokens

        countdown = Countdown(len(todo))
        for number, line in enumerate(
            annotate.annotate(
                todo,
                episodes,
                prompts,
                ask,
                rules=annotate.Rules(h.min_words, a.leaks, too_long),
                asks=a.asks if a.writer == "openai" else 1,  # greedy decoding and rules would say the same again
            ),
            1,
        ):
            append_jsonl(path, line)
            if countdown.due(SAY_EVERY_S):
                print(f"{number}/{len(todo)} episodes, {countdown.text(number)}", flush=True)
    usd = (a.usd_per_million_prompt_tokens, a.usd_per_million_completion_tokens)
    report = annotate.report(records_lib.read_records(path), len(played), usd)
    return {"missing": report["without_answer"], **report}


def _writer(config, out: Path, episodes: list[Episode]) -> tuple[Any, annotate.Ask]:
    """(the tokenizer of the model that will learn, which limits the prompts; who is asked)."""
    a, h = config.annotate, config.hindsight
    if a.writer == "policy":
        sampler, tokenizer = common.open_model(config)
        return tokenizer, annotate.by_policy(sampler, tokenizer, h.max_skill_tokens)
    model_dir = hf.resolve(config.model.init)
    vision = hf.load_spec(model_dir).vision if any(shown(episode.turns) for episode in episodes) else None
    tokenizer = tok.load_tokenizer(model_dir, config.rollout.thinking, vision)
    if a.writer == "planner":
        tasks = {task.id: task for task in tasks_of(config)[0]}
        with open_world(config, list(tasks.values())[:1]) as world:
            domain = world.domain
        if not hasattr(domain, "write_skill"):
            raise config_lib.ConfigError(f"annotate.writer = 'planner': {config.env.name} has no rules for skills")

        def write(index: int) -> Skill:
            episode = episodes[index]
            steps = [(turn.command or "", turn.result) for turn in episode.turns]
            return Skill(*domain.write_skill(tasks[episode.task_id], steps, episode.won))

        return tokenizer, annotate.by_rules(write)
    client = Client(h.api_url, h.api_model, h.api_timeout_s, h.api_workers, a.retries, cache=out / "cache")
    return tokenizer, annotate.by_service(client, a.max_tokens)


# -- dataset -----------------------------------------------------------------------------------------------------------


def make_dataset(config, out: Path) -> dict[str, Any]:
    a = config.annotate
    sources = [(out / records_lib.ROLLOUTS_FILE, "rollouts"), (out / records_lib.SKILLS_FILE, "skills")]
    if a.following:
        _check_placement(config, out)
        sources.append((out / records_lib.FOLLOWED_FILE, "following"))
    episodes, skills, *followed = dataset.load_sources(*sources)
    how = config.env.prompt, config.hindsight.placement
    rows = [row for lines in followed for row in dataset.following_rows(lines, *how)]
    train, val, meta = dataset.build(
        episodes,
        skills,
        fraction=a.val_fraction,
        acting=a.acting,
        seed=config.seed,
        followed=rows,
        following=a.following,
    )
    meta |= {"prompt_style": config.env.prompt, "max_analysis_tokens": config.hindsight.max_analysis_tokens}
    dataset.write(out, train, val, meta)
    for kind, field in ((dataset.ACT, "acting"), (dataset.FOLLOW, "following")):
        wanted = round(a[field] * meta["train"].get(dataset.SKILL, 0))
        if meta["train"].get(kind, 0) < wanted:
            print(
                f"note: {meta['train'].get(kind, 0)} {field} rows where annotate.{field} asks for {wanted}: the "
                "successful episodes have no more turns",
                file=sys.stderr,
            )
    return meta


def _check_placement(config, out: Path) -> None:
    """A row is a text that the model's template is applied to, so a skill must have its place in that text."""
    placement = config.hindsight.placement
    if placement not in TEXT_PLACEMENTS:
        raise config_lib.ConfigError(
            f"annotate.following = {config.annotate.following:g}, hindsight.placement = {placement!r}: a row of the "
            f"data has its skill in the user message; set the second to {' or '.join(map(repr, TEXT_PLACEMENTS))}"
        )
    played = records_lib.noted_settings(out).get("following", {})
    for field, mine in (("hindsight.placement", placement), ("env.prompt", config.env.prompt)):
        if played.get(field, mine) != mine:
            raise records_lib.RecordError(
                f"{field} = {mine!r}: the episodes of {out / records_lib.FOLLOWED_FILE} were played with "
                f"{played[field]!r}; use the config that they were made with"
            )


_STAGE_OF = {
    "rollouts": lambda config, out: collect(config, out, _SERVER.value, _SERVED_MODEL.value),
    "skills": write_skills,
    "following": follow,
    "dataset": make_dataset,
}


def run() -> None:
    flags.mark_flags_as_required(["config", "stage", "out"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run()
