"""Runs a named sweep (configs/sweeps.py), one setting after the other, and compares them.

python -m launch.sweep --sweep=NAME --workdir=DIR [--config=FILE[:METHOD]] [--config.FIELD=VALUE ...]

Each setting has its own directory in the workdir, named by what it changes. The same command goes on where it stopped:
finished settings are skipped, the interrupted one resumes. A setting that fails is reported and the next one starts.
Nothing is started before all settings are known to be possible. `--config.FIELD=VALUE` applies to every setting.

All settings run in this process: those that differ in numbers only share one compiled update. `sweep.json` and
`sweep.txt` hold the comparison so far.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from absl import app, flags

from configs.sweeps import SWEEPS
from launch import common
from launch.settings import Planned, SweepError, parse_overrides, plan
from seed_jax import config as config_lib
from seed_jax.report.comparison import figures, read_summary, run_table, seed_table
from seed_jax.runtime.logging import duration, jsonable, write_whole
from seed_jax.runtime.signals import Interrupted

REPORT_FILE, TABLE_FILE = "sweep.json", "sweep.txt"


def finished(planned: Planned, workdir: Path) -> dict | None:
    """The summary of a setting that needs no further run: of the same config and with as many iterations."""
    summary = read_summary(workdir / planned.name)
    same = summary and summary["config_hash"] == config_lib.config_hash(planned.config)
    return summary if same and summary["iterations"] >= planned.config.iterations else None


class Report:
    """What became of each setting so far; written after every change."""

    def __init__(self, name: str, runs: list[Planned], workdir: Path):
        self.name, self.workdir = name, workdir
        self.records = [
            {"name": run.name, "setting": run.setting, "directory": str(workdir / run.name), "status": "waiting"}
            for run in runs
        ]

    def note(self, place: int, status: str, summary: dict | None = None, error: str = "") -> None:
        record = self.records[place]
        record["status"] = f"{status}: {error}" if error else status
        if summary:
            record["figures"] = figures(summary)
        content = {"sweep": self.name, "runs": self.records}
        write_whole(self.workdir / REPORT_FILE, json.dumps(jsonable(content), indent=2) + "\n")
        write_whole(self.workdir / TABLE_FILE, self.text() + "\n")

    def text(self) -> str:
        return "\n\n".join(filter(None, (run_table(self.records), seed_table(self.records))))


def run_all(name: str, runs: list[Planned], workdir: Path) -> tuple[int, Report]:
    """Runs what is not finished -> (exit code, report)."""
    workdir.mkdir(parents=True, exist_ok=True)
    report, code, minutes = Report(name, runs, workdir), 0, []
    for place, run in enumerate(runs):
        summary = finished(run, workdir)
        if summary:
            report.note(place, "finished", summary)
            print(f"[{place + 1}/{len(runs)}] {run.name}: finished earlier", flush=True)
            continue
        left = f", about {duration(60 * sum(minutes) / len(minutes) * (len(runs) - place))} left" if minutes else ""
        print(f"\n[{place + 1}/{len(runs)}] {run.name}{left}", flush=True)
        report.note(place, "running")
        try:
            summary = common.run(run.config, workdir / run.name)
        except Interrupted:
            report.note(place, "interrupted")
            return common.EXIT_INTERRUPTED, report
        except Exception as error:  # the other settings do not depend on this one; it is reported and tried again
            if not isinstance(error, (*common.INPUT_ERRORS, *common.RUN_ERRORS)):
                traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            print(f"{run.name} failed: {type(error).__name__}: {first_line}", file=sys.stderr, flush=True)
            report.note(place, "failed", error=f"{type(error).__name__}: {first_line[:200]}")
            code = common.EXIT_FAILED
            continue
        report.note(place, "finished", summary)
        minutes.append(summary["minutes"])
    return code, report


def start(name: str, runs: list[Planned], workdir: Path) -> int:
    """Prepares the process, runs everything, prints the comparison; returns the exit code."""
    common.prepare_process([run.config for run in runs])
    code, report = run_all(name, runs, workdir)
    print(f"\n{report.text()}\n\ncomparison: {workdir / TABLE_FILE}, {workdir / REPORT_FILE}", flush=True)
    if code:
        print("not everything is finished; the same command goes on", file=sys.stderr)
    return code


def main(argv: list[str]) -> int:
    name, workdir = flags.FLAGS.sweep, Path(flags.FLAGS.workdir)
    try:
        if name not in SWEEPS:
            known = "\n".join(f"  {known:<16}{sweep.about}" for known, sweep in SWEEPS.items())
            raise SweepError(f"there is no sweep {name!r}; configs/sweeps.py has:\n{known}")
        overrides = parse_overrides(argv[1:])
        runs = plan(flags.FLAGS.config or SWEEPS[name].config, SWEEPS[name].settings, overrides, workdir)
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    return start(name, runs, workdir)


def run() -> None:
    flags.DEFINE_string("sweep", None, "name of a sweep in configs/sweeps.py")
    flags.DEFINE_string("workdir", None, "directory that receives a directory for each setting")
    flags.DEFINE_string("config", None, "config file instead of the sweep's, with the method after a colon")
    flags.mark_flags_as_required(["sweep", "workdir"])
    # What absl does not know are overrides or mistakes: `parse_overrides` tells them apart.
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))


if __name__ == "__main__":
    run()
