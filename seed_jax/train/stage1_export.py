"""What a stage-1 run leaves: the workdir it owns, Hugging Face directories with a card, and the summary."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seed_jax import config as config_lib
from seed_jax.hindsight import dataset
from seed_jax.models import hf
from seed_jax.runtime.logging import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    WorkdirError,
    jsonable,
    read_jsonl,
    remove_files,
    write_whole,
)
from seed_jax.train import card
from seed_jax.train.export import hub_id, token_ids

RUN_FILE = "stage1.json"  # marks a workdir as a run of stage 1, and says of which config and data
OWN_FILES = (METRICS_FILE, EVALUATIONS_FILE, SUMMARY_FILE, "checkpoints", "best", "last", "tensorboard", RUN_FILE)
_SHAPING = ("model.", "sft.", "env.", "rollout.max_", "rollout.require_think", "rollout.thinking")
_SHAPING_FIELDS = ("seed", "eval.seed", "hindsight.max_skill_tokens", "hindsight.min_words")
_FREE = ("sft.checkpoint_every", "env.workers", "env.step_timeout_s", "rollout.max_rounds")


def prepare_workdir(workdir: Path, config, data: Mapping[str, Any], overwrite: bool = False) -> None:
    """Creates a workdir, or adopts that of the same run; data: dataset.json. Raises WorkdirError."""
    mine = {
        "config": {field: value for field, value in config_lib.flatten(config).items() if _shapes(field)},
        "data": dict(data["sha256"]),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if overwrite and (workdir / RUN_FILE).exists():
            remove_files(workdir, OWN_FILES)
        stored = json.loads((workdir / RUN_FILE).read_text()) if (workdir / RUN_FILE).exists() else None
        foreign = [name for name in (CONFIG_FILE, *OWN_FILES) if stored is None and (workdir / name).exists()]
        if foreign:
            raise WorkdirError(
                f"workdir {workdir} has {foreign[0]} but no {RUN_FILE}, so it is not of stage 1; choose another "
                "--workdir"
            )
        if stored is not None and stored != mine:
            lines = "\n".join(f"  - {line}" for line in config_lib.diff(stored, mine))
            raise WorkdirError(
                f"workdir {workdir} belongs to a run of another config or data (its value -> yours):\n{lines}\n"
                "Choose another --workdir, or add --overwrite to start again here."
            )
        write_whole(workdir / RUN_FILE, json.dumps(mine, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise WorkdirError(f"cannot write to workdir {workdir}: {error.strerror}; choose another --workdir") from error
    except ValueError as error:
        raise WorkdirError(f"{workdir / RUN_FILE} is damaged ({error}); add --overwrite to start again") from error


def _shapes(field: str) -> bool:
    return (field.startswith(_SHAPING) or field in _SHAPING_FIELDS) and field not in _FREE


def export(run, params, step: int, name: str) -> None:
    """The weights after `step` steps as a Hugging Face directory `name` in the workdir."""
    base = hub_id(run.model_dir) or "/".join(Path(run.config.model.init).parts[-2:])
    record = {
        "method": "stage1",
        "steps": step,
        "base_model": base,
        "data": json.loads((run.workdir / RUN_FILE).read_text())["data"],
    }
    hf.save(
        params,
        run.spec,
        run.workdir / name,
        tokenizer_dir=run.model_dir,
        extra_files={"README.md": _card(run, step, base)},
        record=record,
        **token_ids(run.model_dir),
    )


def _card(run, step: int, base: str) -> str:
    config = run.config
    count = {kind: sum(row["kind"] == kind for row in run.data.train) for kind in dataset.KINDS}
    counts = ", ".join(f"{n} {kind} rows" for kind, n in count.items() if n)
    return "\n".join(
        [
            "---",
            card.header(run.spec, hub_id(run.model_dir)),
            "---",
            "",
            f"# {card.plain(base)} after hindsight-skill fine-tuning",
            "",
            f"{step} optimizer steps of {config.sft.batch} examples on {counts}; environment `{config.env.name}` "
            f"({config.env.prompt} prompt). It writes hindsight skills about finished episodes and is the start of",
            "reinforcement learning. Exported by seed-jax; `seed_jax.json` has the facts for programs.",
            "",
        ]
    )


def write_summary(run) -> dict[str, Any]:
    """summary.json: validation before training, of the best and of the last weights."""
    records = read_jsonl(run.workdir / EVALUATIONS_FILE)
    best = [record for record in records if record["best"]]
    summary = {
        "steps": run.batches.steps,
        "before": records[0],
        "best": best[-1] if best else None,
        "last": records[-1],
        "minutes": sum(run.timer.totals.values()) / 60,  # of this process
        "data_sha256": hashlib.sha256(
            json.dumps(json.loads((run.workdir / RUN_FILE).read_text())["data"], sort_keys=True).encode()
        ).hexdigest()[:16],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_whole(run.workdir / SUMMARY_FILE, json.dumps(jsonable(summary), indent=1) + "\n")
    return summary
