"""Whole sweeps of the tiny model: one compiled update for all numbers, results as of single runs, nothing lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.sweeps import product
from launch import common, sweep
from launch.settings import plan
from seed_jax.hindsight.analyzer import NoSkills
from seed_jax.train import compiled
from tests import tiny, xla

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def one_device(tmp_path_factory):
    with tiny.one_device(tmp_path_factory.mktemp("xla")):
        yield


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> str:
    """The tiny config with a library of skills, since the tiny model can write none."""
    home = tmp_path_factory.mktemp("home")
    tiny.save_model(home / "model", steps=60)
    (home / "toy.py").write_text(
        "from pathlib import Path\n"
        "from tests import tiny\n"
        "def get_config(method='seed'):\n"
        f"    config = tiny.config(Path({str(home / 'model')!r}), method)\n"
        "    config.log.diagnostics_episodes = 0\n"
        "    config.log.tensorboard = False\n"
        "    config.eval.temperatures = (0.4,)\n"
        "    if method == 'seed':\n"
        "        config.hindsight.source = 'static_library'\n"
        "    return config\n"
    )
    return str(home / "toy.py")


@pytest.fixture(autouse=True)
def updates():
    """The compiled updates of this test only."""
    compiled._UPDATES.clear()
    yield compiled._UPDATES
    compiled._UPDATES.clear()


SIX = product({"distill.coef": (0.003, 0.01, 0.03), "distill.beta": (1.0, 5.0)})


@pytest.fixture(scope="module")
def six(config_file, tmp_path_factory):
    """The sweep of six settings -> (workdir, exit code, how often the update was compiled, what it printed)."""
    workdir = tmp_path_factory.mktemp("sweeps") / "six"
    compiled._UPDATES.clear()
    code, report = sweep.run_all("six", plan(config_file, SIX, {}, workdir), workdir)
    (update,) = compiled._UPDATES.values()
    return workdir, code, update._cache_size(), report


def test_six_settings_compile_the_update_once(six):
    _, code, compilations, report = six
    assert code == 0 and [record["status"] for record in report.records] == ["finished"] * 6
    assert compilations == 1


def test_numbers_reach_the_update(six):
    weights = {(path / "export" / "model.safetensors").read_bytes() for path in six[0].iterdir() if path.is_dir()}
    assert len(weights) == 6, "each setting trains to other weights"


def test_a_setting_gives_what_a_run_of_its_own_gives(six, config_file, tmp_path):
    """Bit for bit: nothing passes from one setting of a process to the next."""
    (run,) = plan(config_file, [SIX[4]], {}, tmp_path)
    common.run(run.config, tmp_path / run.name)
    alone, swept = tiny.outcome(tmp_path / run.name, 2), tiny.outcome(six[0] / run.name, 2)
    for part in alone:
        assert alone[part] == swept[part], part


def test_what_a_sweep_leaves(six):
    workdir, _, _, report = six
    names = {f"coef={coef},beta={beta}" for coef in (0.003, 0.01, 0.03) for beta in (1.0, 5.0)}
    assert {path.name for path in workdir.iterdir()} == names | {"sweep.json", "sweep.txt"}
    stored = json.loads((workdir / "sweep.json").read_text())
    assert stored["sweep"] == "six" and [run["setting"] for run in stored["runs"]] == SIX
    for run in stored["runs"]:
        summary = json.loads((Path(run["directory"]) / "summary.json").read_text())
        assert run["figures"]["held_out"]["T=0.4"]["after"] == summary["eval_after"]
    assert (workdir / "sweep.txt").read_text() == report.text() + "\n"
    assert len(report.text().splitlines()) == 7


def test_finished_settings_are_skipped_and_more_iterations_extend_them(six, config_file, monkeypatch, capsys):
    workdir, started, run = six[0], [], common.run
    monkeypatch.setattr(
        common, "run", lambda config, directory: started.append(directory.name) or run(config, directory)
    )
    code, report = sweep.run_all("six", plan(config_file, SIX, {}, workdir), workdir)
    assert code == 0 and started == [] and all("figures" in record for record in report.records)
    assert capsys.readouterr().out.count("finished earlier") == 6
    longer = plan(config_file, SIX, {"iterations": "3"}, workdir)
    sweep.run_all("six", longer[:1], workdir)
    assert started == [longer[0].name]
    assert json.loads((workdir / longer[0].name / "summary.json").read_text())["iterations"] == 3


def test_another_structure_compiles_anew(config_file, tmp_path, updates):
    settings = [{"method": "grpo"}, {"method": "seed"}, {"method": "grpo", "seed": 1}]
    code, _ = sweep.run_all("both", plan(config_file, settings, {"iterations": "1"}, tmp_path), tmp_path)
    assert code == 0 and [update._cache_size() for update in updates.values()] == [1, 1]


def test_only_the_last_few_structures_are_kept(monkeypatch, updates):
    built = []
    monkeypatch.setattr(compiled, "structure", lambda config, spec, mesh: config.name)
    monkeypatch.setattr(compiled, "build_update", lambda config, *_: built.append(config.name) or config.name)
    optim = SimpleNamespace(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, grad_clip=1.0)
    for name in "abcdaeb":  # "b" has made room when it comes back, "a" was used in between
        compiled.shared_update(SimpleNamespace(name=name, optim=optim), None, None, None)
    assert built == list("abcdeb") and list(updates.values()) == list("daeb") and compiled.KEPT == 4
    other = SimpleNamespace(name="b", optim=SimpleNamespace(**vars(optim) | {"b1": 0.5}))
    compiled.shared_update(other, None, None, None)
    assert built == list("abcdebb"), "numbers inside the optimizer are part of the program"


def test_a_setting_that_fails_is_reported_and_the_others_run(config_file, tmp_path, monkeypatch, capsys):
    settings, run = product({"seed": (0, 1, 2)}), common.run

    def fail(config, directory):
        if config.seed == 1:
            raise NoSkills("no turn got\na skill")
        return run(config, directory)

    monkeypatch.setattr(common, "run", fail)
    runs = plan(config_file, settings, {"iterations": "1"}, tmp_path)
    code, report = sweep.run_all("seeds", runs, tmp_path)
    assert code == common.EXIT_FAILED
    assert [r["status"] for r in report.records] == ["finished", "failed: NoSkills: no turn got", "finished"]
    assert "Traceback" in capsys.readouterr().err
    assert report.text().splitlines()[-1].split()[0] == "2", "the table over seeds has the finished ones"
    monkeypatch.setattr(common, "run", run)
    code, report = sweep.run_all("seeds", runs, tmp_path)
    assert code == 0 and [r["status"] for r in report.records] == ["finished"] * 3


# -- the command -------------------------------------------------------------------------------------------------------


def command(config_file: str, workdir: Path, *flags: str, name: str = "opd_coef") -> list[str]:
    return [
        sys.executable, "-m", "launch.sweep", f"--sweep={name}", f"--workdir={workdir}", f"--config={config_file}",
        "--config.iterations=1", *flags,
    ]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    settings = {"HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla.flags(2)}
    return os.environ | settings


def launch(*arguments, **options) -> subprocess.CompletedProcess[str]:
    home = options.pop("home")
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, env=environment(home), cwd=ROOT, timeout=500
    )


@pytest.mark.parametrize(
    ("flags", "name", "message"),
    [
        ([], "opd_ceof", r"error: there is no sweep 'opd_ceof'; configs/sweeps\.py has:\n  seeds +one method"),
        (["--config.optim.lrr=1"], "opd_coef", "in every setting: unknown field optim.lrr; did you mean optim.lr"),
        (["--config.distill.coef=1"], "opd_coef", "the sweep itself sets distill.coef"),
        (["--iterations=3"], "opd_coef", "cannot use the argument '--iterations=3'"),
        (["--config.rollout.group=1"], "opd_coef", "adv.kind = 'grpo', rollout.group = 1"),
    ],
)
def test_bad_input_starts_nothing(config_file, tmp_path, flags, name, message):
    result = launch(config_file, tmp_path / "runs", *flags, name=name, home=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "runs").exists()


def test_killed_and_interrupted_sweep_goes_on(config_file, tmp_path):
    """Killed in the second setting, interrupted in the third, then left alone: every setting is there in the end."""
    workdir = tmp_path / "runs"

    def stop(number: int, how: int) -> tuple[int, str, str]:
        process = subprocess.Popen(
            command(config_file, workdir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(tmp_path), cwd=ROOT,
        )  # fmt: skip
        seen = []
        for line in process.stdout:
            seen.append(line)
            if any(f"[{number}/6]" in earlier for earlier in seen) and "held-out success after iteration 0" in line:
                process.send_signal(how)
                break
        rest, errors = process.communicate(timeout=120)
        return process.returncode, "".join(seen) + rest, errors

    code, _, _ = stop(2, signal.SIGKILL)
    assert code == -signal.SIGKILL
    states = [run["status"] for run in json.loads((workdir / "sweep.json").read_text())["runs"]]
    assert states == ["finished", "running", *["waiting"] * 4]
    first = (workdir / "coef=0.003,beta=1.0" / "summary.json").read_bytes()

    code, out, errors = stop(3, signal.SIGINT)
    assert code == 130 and "Traceback" not in errors, errors
    assert "[1/6] coef=0.003,beta=1.0: finished earlier" in out and "interrupted" in out
    assert "not everything is finished; the same command goes on" in errors

    result = launch(config_file, workdir, home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("finished earlier") == 2
    assert re.search(r"\n\[4/6\] coef=0\.01,beta=5\.0, about \d+:\d\d left\n", result.stdout)
    table = result.stdout[result.stdout.rindex("distill.coef") :].splitlines()
    assert len([line for line in table if line.endswith("finished")]) == 6
    assert (workdir / "coef=0.003,beta=1.0" / "summary.json").read_bytes() == first
