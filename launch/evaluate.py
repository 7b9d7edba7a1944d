"""Evaluates a policy on a frozen panel: every game once (or --repeats times), at each temperature, with fixed seeds.

python -m launch.evaluate --config=configs/alfworld.py --checkpoint=DIR --split=unseen [--config.env.data=official]

--checkpoint is the workdir of a run or a model in Hugging Face format (a directory, or an id of its hub). A model
behind a chat service is evaluated with --server=http://HOST/v1 --served_model=NAME instead. The config says how games
are played: environment, prompt, lengths, skills; its training fields do not matter. The table goes to the terminal and
everything, with the outcome of every episode, to the JSON file --out; --compare=FILE pairs it with an earlier one.

--skills=self|true|wrong|placebo|library measures the teacher: the games are played bare, a skill is found for each
episode, and the same games are played again with it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags
from ml_collections import config_flags

from envs.alfworld import manifest
from launch import common, skill_evaluation
from launch.environment import DataError, open_world, panel_tasks, recorded_games
from seed_jax import config as config_lib
from seed_jax import sharding, teacher
from seed_jax import tokenizer as tok
from seed_jax.evaluate import evaluate, reference_draws
from seed_jax.hindsight.client import Client
from seed_jax.hindsight.sources import Skills
from seed_jax.models import hf
from seed_jax.report.paired import ComparisonError, compare, format_comparison
from seed_jax.report.panel import format_panel, outcomes
from seed_jax.runtime.checkpoint import CheckpointError
from seed_jax.runtime.logging import TurnProgress, append_jsonl, jsonable, write_whole
from seed_jax.sampler.engine import sampler_of
from seed_jax.served import CharacterTokenizer, ServedSampler
from seed_jax.train.export import is_run, open_checkpoint
from seed_jax.train.metrics import episode_record

_CONFIG = config_flags.DEFINE_config_file("config", None, "config file, with the method after a colon")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "workdir of a run, or a model in Hugging Face format")
_STEP = flags.DEFINE_integer("step", None, "iteration of the run; default: its newest checkpoint", lower_bound=0)
_BASE_MODEL = flags.DEFINE_string("base_model", None, "where the base model of the run is now; default: where it was")
_SERVER = flags.DEFINE_string("server", None, "instead of --checkpoint: address of a chat service, up to /v1")
_SERVED_MODEL = flags.DEFINE_string("served_model", None, "the model's name at --server")
_SPLIT = flags.DEFINE_enum(
    "split", None, ["train", "seen", "unseen"], "games to play; default: the config's eval.split"
)
_GAMES = flags.DEFINE_integer(
    "games", None, "number of games; 0 = all; default: the config's eval.games", lower_bound=0
)
_REPEATS = flags.DEFINE_integer("repeats", 1, "episodes of each game and temperature", lower_bound=1)
_TEMPERATURES = flags.DEFINE_list("temperatures", None, "such as 0,0.4 (0 = greedy); default: the config's")
_REFERENCE = flags.DEFINE_bool(
    "reference_style", False, "like the public reference: 128 draws with repetition, at temperature .4 by default"
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write; default: evaluation_SPLIT.json, of a run in its workdir")
_EPISODES = flags.DEFINE_string("episodes", None, "JSONL file to write every episode to, turn by turn")
_COMPARE = flags.DEFINE_string("compare", None, "an earlier result to compare with, game by game")
_SKILLS = flags.DEFINE_enum(
    "skills", None, teacher.KINDS, "play the same games again with a skill in the prompt: written by the policy about "
    "its own episode, true, of another task, filler words, of the config's library",
)  # fmt: skip
_PART = flags.DEFINE_enum(
    "skill_part", "all", teacher.PARTS, "of these skills only what to do, or only where things are"
)
_JSON = flags.DEFINE_bool("json", False, "print the result as one JSON object instead of the table")

SECTIONS = ("env", "rollout", "eval", "mesh", "model")  # of the config: those that every evaluation reads
# Fields in which the run and the evaluation should agree.
_PLAYED_ALIKE = ("env.prompt", "env.history", "env.max_steps", "rollout.max_", "rollout.require_think")
FORMAT = 1  # of the result file


class Policy(NamedTuple):
    """What plays. record: what is written about it; max_prompt_tokens: None = the config's."""

    sampler: Any
    tokenizer: Any
    record: dict[str, Any]
    workdir: Path | None = None  # of the run it comes from
    max_prompt_tokens: int | None = None


class InputError(ValueError):
    """The command line or a file it names cannot be used."""


def main(_) -> int:
    config = _CONFIG.value
    try:
        _check(config)
        other = _read_result(_COMPARE.value)
        common.prepare_process([config])
        result = run(config, other)
        if _JSON.value:
            print(json.dumps(jsonable(result)))
            return 0
        print(format_panel(result))
        if _SKILLS.value:
            print("\n" + skill_evaluation.format_skills(result))
        if other:
            print("\n" + format_comparison(result["comparison"]["results"], "this", _COMPARE.value))
    except (*common.INPUT_ERRORS, InputError, ComparisonError, skill_evaluation.SkillsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    except common.RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return common.EXIT_INTERRUPTED
    return 0


def _check(config) -> None:
    """Raises InputError or one of common.INPUT_ERRORS for what can be known before anything is loaded."""
    if bool(_CHECKPOINT.value) == bool(_SERVER.value):
        raise InputError("name what to evaluate: either --checkpoint=DIR, or --server=URL with --served_model=NAME")
    if _SERVER.value and not _SERVED_MODEL.value:
        raise InputError("--server needs --served_model=NAME, the model's name at that service")
    if _SERVER.value and config.env.observation == "image":
        raise InputError("env.observation = 'image': a served model is sent text alone; set it to 'text'")
    with config.unlocked():
        config.model.init = _CHECKPOINT.value or _SERVED_MODEL.value
        if _SPLIT.value:
            config.eval.split = "seen" if _SPLIT.value == "train" else _SPLIT.value
        config.eval.temperatures = tuple(_temperatures(config))
        if _SKILLS.value:
            skill_evaluation.prepare(config, _SKILLS.value)
        reads_skills = config.hindsight.at_eval != "no" or _SKILLS.value is not None
        if not reads_skills:
            config.hindsight.source = config.hindsight.control = "none"  # no library or service is needed
    config_lib.check(config, (*SECTIONS, "hindsight") if reads_skills else SECTIONS)
    if _SERVER.value and reads_skills:
        raise InputError("a served model is evaluated without skills; set hindsight.at_eval = 'no', leave out --skills")
    if _PART.value != "all" and not _SKILLS.value:
        raise InputError(f"--skill_part={_PART.value} needs --skills, such as --skills=self")


def _temperatures(config) -> list[float]:
    if _TEMPERATURES.value is None:
        return [0.4] if _REFERENCE.value else list(config.eval.temperatures)
    try:
        return [float(text) for text in _TEMPERATURES.value]
    except ValueError as error:
        raise InputError(f"--temperatures={','.join(_TEMPERATURES.value)}: must be numbers, such as 0,0.4") from error


def run(config, other: dict[str, Any] | None) -> dict[str, Any]:
    """Plays the panel at every condition and writes the result; returns it."""
    start = time.perf_counter()
    tasks = _panel(config)
    panel = _describe_panel(config, tasks)
    try:
        policy = _served(config) if _SERVER.value else _local(config)
    except (OSError, ValueError, CheckpointError) as error:
        raise InputError(str(error)) from error
    _check_games(policy, panel)
    out = _writable("out", _OUT.value or (policy.workdir or Path(".")) / f"evaluation_{panel['split']}.json")
    transcript = _writable("episodes", _EPISODES.value) if _EPISODES.value else None
    if transcript:
        transcript.write_text("")  # of an earlier evaluation
    if other:  # before anything is played
        _check_comparable(panel, other)
    results, measured, pool = _play(config, policy, tasks, transcript)
    result = {
        "format": FORMAT,
        "policy": policy.record,
        "panel": panel,
        "repeats": _REPEATS.value,
        "seed": config.eval.seed,
        "config": {section: config[section].to_dict() for section in ("env", "rollout", "hindsight", "eval")},
        "results": results,
        "pool": pool,
        "seconds": time.perf_counter() - start,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if measured:  # the first temperature is the headline
        result |= {**measured[0], "temperatures": measured}
    if other:
        result["comparison"] = {"with": str(_COMPARE.value), "results": compare(result, other)}
    write_whole(out, json.dumps(jsonable(result), indent=1) + "\n")
    print(f"written: {out}", file=sys.stderr if _JSON.value else sys.stdout)
    return result


def _play(
    config, policy: Policy, tasks: Sequence[Any], transcript: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(results of every condition, what is measured of the teacher at every temperature, counts of the pool)."""
    skills = Skills(config, policy.tokenizer, {task.family for task in tasks})
    conditions = [(t, read) for read in skills.at_eval for t in config.eval.temperatures]
    results, measured = [], []
    passes = len(conditions) * (2 if _SKILLS.value else 1)
    with open_world(config, tasks[:1]) as world, _progress(config, passes) as on_turn:
        if _SKILLS.value:
            skill_evaluation.check_world(_SKILLS.value, _PART.value, config.env.name, world.domain)
        for temperature, with_skills in conditions:
            summary, episodes, own = evaluate(
                policy.sampler,
                policy.tokenizer,
                world,
                tasks,
                temperature=float(temperature),
                max_tokens=config.rollout.max_response_tokens,
                max_prompt_tokens=policy.max_prompt_tokens or config.rollout.max_prompt_tokens,
                seed=config.eval.seed,
                skills=skills if with_skills else None,
                repeats=_REPEATS.value,
                on_turn=on_turn,
            )
            results.append({**summary, "outcomes": outcomes(episodes, len(tasks))})
            for episode in episodes if transcript else ():
                append_jsonl(transcript, {"temperature": temperature, **episode_record(episode)})
            if _SKILLS.value:
                player = skill_evaluation.player_of(config, policy, world, skills, float(temperature), on_turn)
                measured.append(skill_evaluation.measure(_SKILLS.value, _PART.value, player, tasks, own))
        pool = world.pool.stats()
    return results, measured, pool


def _panel(config) -> list:
    split = _SPLIT.value or config.eval.split
    try:
        tasks = panel_tasks(config, split, 0 if _REFERENCE.value and _GAMES.value is None else _GAMES.value)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(str(error)) from error
    return reference_draws(tasks) if _REFERENCE.value else tasks


def _describe_panel(config, tasks: Sequence[Any]) -> dict[str, Any]:
    games = manifest.of_games(tasks)
    split = _SPLIT.value or config.eval.split
    return {
        "split": split,
        "data": config.env.data,
        "reference_style": _REFERENCE.value,
        "draws": len(tasks),
        "sha256": games["sha256"],
        "games": games["count"],
        "digests": games["games"],
    }


def _check_games(policy: Policy, panel: dict[str, Any]) -> None:
    """The panel against the games that the policy's run recorded: same content, and not those it was trained on."""
    recorded = recorded_games(policy.workdir) if policy.workdir else None
    if recorded is None:
        return
    now = {"games": panel["digests"]}
    try:
        manifest.check_same(recorded["panel"], now, "panel games")
        panel["trained_on"] = manifest.check_same(recorded["train"], now, "training games")
    except manifest.ManifestError as error:
        raise DataError(str(error)) from error
    if panel["trained_on"]:
        print(f"note: the policy was trained on {panel['trained_on']} of these {panel['games']} games", file=sys.stderr)


def _local(config) -> Policy:
    """Sampler and tokenizer with the weights of --checkpoint."""
    mesh = sharding.make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    path = Path(_CHECKPOINT.value).expanduser()
    record: dict[str, Any] = {"checkpoint": _CHECKPOINT.value}
    workdir = None
    if is_run(path):
        opened = open_checkpoint(path, _STEP.value, _BASE_MODEL.value)
        workdir, model_dir, spec = opened.workdir, opened.model_dir, opened.spec
        params = jax.device_put(opened.params, sharding.param_shardings(spec, mesh, "train"))
        record |= {"iteration": opened.iteration, "method": opened.config["method"], "seed": opened.config["seed"]}
        for line in config_lib.diff(opened.config, config):
            if line.startswith(_PLAYED_ALIKE):
                print(f"note: not as in the run (its value -> yours): {line}", file=sys.stderr)
    else:
        model_dir = hf.resolve(_CHECKPOINT.value)
        spec, params = hf.load(model_dir, mesh)
    tokenizer = tok.load_tokenizer(model_dir, config.rollout.thinking, spec.vision)
    sampler = sampler_of(config, spec, tokenizer, mesh)
    sampler.load(params)
    return Policy(sampler, tokenizer, record, workdir)


def _served(config) -> Policy:
    h = config.hindsight
    client = Client(_SERVER.value, _SERVED_MODEL.value, h.api_timeout_s, h.api_workers, source="--server")
    record = {"server": _SERVER.value, "model": _SERVED_MODEL.value}
    # The service counts tokens, and refuses a prompt that is too long for it.
    return Policy(ServedSampler(client), CharacterTokenizer(), record, max_prompt_tokens=sys.maxsize)


@contextlib.contextmanager
def _progress(config, conditions: int) -> Iterator[TurnProgress]:
    progress = TurnProgress(config.env.max_steps, conditions * _REPEATS.value, enabled=jax.process_index() == 0)
    try:
        yield progress
    finally:
        progress.close()


def _writable(flag: str, path: str | Path) -> Path:
    """Fails before an hour of evaluation does."""
    out = Path(path).expanduser()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(out.name + ".partial")
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write --{flag}={out}: {error.strerror}") from error
    return out


def _read_result(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        result = json.loads(Path(path).read_text())
        if result["format"] != FORMAT or not {"panel", "results"} <= result.keys():
            raise KeyError("format")
    except OSError as error:
        raise InputError(f"--compare={path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--compare={path} is not a result that launch.evaluate wrote ({error})") from error
    return result


def _check_comparable(panel: dict[str, Any], other: dict[str, Any]) -> None:
    compare({"panel": panel, "results": other["results"]}, other)


def run_app() -> None:
    flags.mark_flags_as_required(["config"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run_app()
