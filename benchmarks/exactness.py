"""Kills a real run again and again, and compares what it leaves in the end with an uninterrupted one, bit by bit.

    python -m benchmarks.exactness --config=configs/quickstart.py --out=runs/exactness --kills=10 \\
        --config.iterations=12 --config.checkpoint.every=1 --config.rollout.tasks=4 --config.eval.games=24

Further arguments --config.FIELD=VALUE go to the run, which is `launch.train` in a process of its own. Each time it gets
SIGKILL at a random moment of a phase (rollout, analysis, update, save, in turn; of the first or second iteration that
it does) and the same command starts it again.
Compared are the exported weights, checksums of all arrays of the last checkpoint (weights, optimizer, counters),
metrics, evaluations and episodes; what depends on the machine (times, tokens a second, compilations) is left out.
Exit code 0: equal; 1: not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from seed_jax.runtime.logging import EPISODES_FILE, EVALUATIONS_FILE, METRICS_FILE, PhaseTimer, is_measured, read_jsonl

PHASES = ("rollout", "analysis", "update", "save")
_PHASE_FILE = "SEED_JAX_PHASE_FILE"  # variable of the child: where it says which phase it is in
_LIMIT_S = 3600.0


def child() -> None:
    """`launch.train` with the command line as it is, telling its phases."""
    from launch import train

    path, call, count = Path(os.environ[_PHASE_FILE]), PhaseTimer.__call__, 0

    def told(self, phase):
        nonlocal count
        count += 1
        partial = path.with_suffix(".partial")
        partial.write_text(f"{phase} {count}")
        partial.replace(path)
        return call(self, phase)

    PhaseTimer.__call__ = told
    train.run()


def start(arguments: Sequence[str], workdir: Path, log: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    phase_file = log.with_name("phase")
    phase_file.write_text("start 0")
    code = "from benchmarks.exactness import child; child()"
    command = [sys.executable, "-c", code, *arguments, f"--workdir={workdir}"]
    with log.open("a") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env={**environment, _PHASE_FILE: str(phase_file)}
        )


def kill_in(process: subprocess.Popen, phase: str, time_: int, delay_s: float, log: Path) -> bool:
    """Waits until the run comes to `phase` for the `time_`-th time, kills it `delay_s` seconds later; False if it had
    ended by then."""
    began, seen = time.monotonic(), set()
    while process.poll() is None and time.monotonic() - began < _LIMIT_S:
        now, number = log.with_name("phase").read_text().split()
        seen |= {number} if now == phase else set()
        if len(seen) == time_:
            time.sleep(delay_s)
            break
        time.sleep(0.002)
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return True


def outcome(workdir: Path) -> dict[str, Any]:
    """What must not depend on interruptions."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    records = read_jsonl(workdir / METRICS_FILE)
    return {
        "weights": hashlib.sha256((workdir / "export" / "model.safetensors").read_bytes()).hexdigest(),
        "checkpoint": json.loads((newest / "meta" / "metadata").read_text())["leaf_checksums"],
        "metrics": [{k: v for k, v in record.items() if not is_measured(k)} for record in records],
        "evaluations": read_jsonl(workdir / EVALUATIONS_FILE),
        "episodes": read_jsonl(workdir / EPISODES_FILE),
    }


def run(
    arguments: Sequence[str],
    out: Path,
    kills: int,
    seed: int,
    environment: Mapping[str, str],
    phases: Sequence[str] = PHASES,
) -> dict[str, Any]:
    """{"kills": what was done, "different": parts that differ}. Raises RuntimeError if a run fails by itself."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    whole, broken = out / "uninterrupted", out / "interrupted"
    _finish(start(arguments, whole, log, environment), log)
    records = read_jsonl(whole / METRICS_FILE)
    seconds = {phase: records[-1].get(f"time/{phase}_s", 0.2) for phase in phases}
    phases = [phase for phase in phases if phase == "save" or any(f"time/{phase}_s" in record for record in records)]
    random_, done = random.Random(seed), []
    for number in range(kills):
        phase = phases[number % len(phases)]
        time_, delay = random_.randint(1, 2), random_.uniform(0, seconds[phase])
        process = start(arguments, broken, log, environment)
        if not kill_in(process, phase, time_, delay, log):
            if process.returncode:
                raise RuntimeError(f"the run failed with code {process.returncode}; see {log}")
            break
        last = log.with_name("phase").read_text().split()[0]  # the phase may have ended within the delay
        done.append({"asked": phase, "killed_in": last, "delay_s": round(delay, 3)})
        print(f"kill {number + 1}: {phase} + {delay:.2f} s (in {last})", flush=True)
    _finish(start(arguments, broken, log, environment), log)
    expected, found = outcome(whole), outcome(broken)
    return {"kills": done, "different": [part for part in expected if found[part] != expected[part]]}


def _finish(process: subprocess.Popen, log: Path) -> None:
    if process.wait():
        raise RuntimeError(f"the run failed with code {process.returncode}; see {log}")


def main(argv: list[str]) -> int:
    from launch.settings import parse_overrides

    parse_overrides(argv[1:])  # refuses what is no override
    arguments = [f"--config={flags.FLAGS.config}", *argv[1:]]
    result = run(arguments, Path(flags.FLAGS.out), flags.FLAGS.kills, flags.FLAGS.seed, os.environ)
    print(json.dumps(result))
    equal = not result["different"] and len(result["kills"]) == flags.FLAGS.kills
    print(f"{len(result['kills'])} kills; " + ("equal" if equal else f"different: {result['different']}"))
    return 0 if equal else 1


if __name__ == "__main__":
    flags.DEFINE_string("config", "configs/quickstart.py", "config file, with the method after a colon")
    flags.DEFINE_string("out", "runs/exactness", "directory of both runs")
    flags.DEFINE_integer("kills", 10, "how often the run is killed")
    flags.DEFINE_integer("seed", 0, "seed of the moments")
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
