"""Stage 1, the training: fine-tunes a model on the data that launch.annotate made, or resumes it.

python -m launch.sft --config=configs/alfworld.py --config.model.init=DIR --data=data/stage1 --workdir=runs/stage1

The workdir receives best/ and last/ (Hugging Face format: --config.model.init=runs/stage1/best starts reinforcement
learning), checkpoints, metrics.jsonl, evaluations.jsonl and summary.json. The same command goes on where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from launch import common
from launch.environment import DataError, open_world, tasks_of
from seed_jax import config as config_lib
from seed_jax.hindsight import dataset
from seed_jax.hindsight.pictures import Reader
from seed_jax.hindsight.records import RecordError
from seed_jax.runtime.checkpoint import CheckpointError
from seed_jax.runtime.signals import Interrupted
from seed_jax.train.stage1 import Data, train_stage1, validation_text
from seed_jax.train.stage1_data import LengthError
from seed_jax.train.stage1_export import prepare_workdir

SECTIONS = ("env", "rollout", "hindsight", "sft", "mesh", "model", "seed", "eval", "checkpoint", "log")

_CONFIG = config_flags.DEFINE_config_file("config", None, "config file, with the method after a colon")
_DATA = flags.DEFINE_string("data", None, "directory that launch.annotate has written")
_WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run (created; an earlier run in it is resumed)")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "start again in a workdir that holds another run of stage 1, removing that run's files"
)

INPUT_ERRORS = (*common.INPUT_ERRORS, RecordError, LengthError, CheckpointError)


def main(_) -> int:
    config, workdir = _CONFIG.value, Path(_WORKDIR.value).expanduser()
    try:
        summary = run(config, Path(_DATA.value).expanduser(), workdir, overwrite=_OVERWRITE.value)
    except (*INPUT_ERRORS, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    except common.RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_FAILED
    except (Interrupted, KeyboardInterrupt):
        return common.EXIT_INTERRUPTED
    for name in ("before", "best", "last"):
        if summary[name]:
            print(f"{name:<8}{validation_text(summary[name])}")
    _warn(summary)
    print(f"weights: {workdir / 'best'} (lowest validation loss), {workdir / 'last'}")
    return 0


def run(config, data_dir: Path, workdir: Path, *, overwrite: bool = False) -> dict:
    """Trains in a workdir, or resumes what it holds; returns the summary."""
    with config.unlocked():
        config.hindsight.source, config.hindsight.control = "self_hindsight", "none"  # no library is read here
    config_lib.check(config, SECTIONS)
    train, val, meta = dataset.read(data_dir)
    _check_data(config, train, val, meta)
    common.prepare_process([config], config.sft.rows_per_micro)
    prepare_workdir(workdir, config, meta, overwrite)
    tasks = _validation_tasks(config, meta)
    with open_world(config, tasks[:1]) as world:
        return train_stage1(config, Data(train, val, tasks, Reader(data_dir)), world, workdir)


def _check_data(config, train, val, meta) -> None:
    if meta.get("prompt_style") != config.env.prompt:
        raise RecordError(
            f"the data has {meta.get('prompt_style')!r} prompts and env.prompt = {config.env.prompt!r}; use the config "
            "that the data was made with"
        )
    images = meta.get("images", 0)
    if bool(images) != (config.env.observation == "image"):
        raise RecordError(
            f"the data has {images} images and env.observation = {config.env.observation!r}; use the config that the "
            "data was made with"
        )
    if meta["max_analysis_tokens"] > config.hindsight.max_analysis_tokens:
        raise RecordError(
            f"hindsight.max_analysis_tokens = {config.hindsight.max_analysis_tokens}: the data was made with "
            f"{meta['max_analysis_tokens']}, so some prompts may be longer; raise it to that"
        )
    for name, rows, remedy in (
        ("train.jsonl", train, "was any skill usable? see report_skills.json"),
        ("val.jsonl", val, "raise annotate.val_fraction above 0, or collect more tasks"),
    ):
        if not any(row["kind"] == dataset.SKILL for row in rows):
            raise RecordError(f"{name} has no row with a skill: {remedy}")


def _validation_tasks(config, meta) -> list:
    """The tasks of the data's validation side, which no training row is about."""
    try:
        known = {task.id: task for task in tasks_of(config)[0]}
    except (ValueError, FileNotFoundError) as error:
        raise DataError(str(error)) from error
    missing = [task for task in meta["val_tasks"] if task not in known]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(meta['val_tasks'])} validation tasks are not among the training tasks of this "
            f"config, first {missing[0]}; use the env section that the data was made with"
        )
    return [known[task] for task in meta["val_tasks"]]


def _warn(summary: dict) -> None:
    before, best = summary["before"], summary["best"] or summary["last"]
    if "success_rate" in best:
        drop = before["success_rate"] - best["success_rate"]
        noise = (before["standard_error"] ** 2 + best["standard_error"] ** 2) ** 0.5
        if drop > 2 * noise:
            print(
                f"warning: acting success fell by {drop:.3f}, more than two standard errors ({noise:.3f}): raise "
                "annotate.acting, or lower sft.lr",
                file=sys.stderr,
            )
    if best["parse_rate"] < 0.95:
        print(
            f"warning: {best['parse_rate']:.3f} of the skills are usable; SEED learns nothing from the other episodes",
            file=sys.stderr,
        )


def run_app() -> None:
    flags.mark_flags_as_required(["config", "data", "workdir"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run_app()
