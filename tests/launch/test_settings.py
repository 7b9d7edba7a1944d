"""Settings of a sweep become checked configs with directories; whatever is wrong is told before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import methods, sweeps
from configs.sweeps import SWEEPS, chain, cross, product, zipped
from launch.settings import MAX_NAME, SweepError, build, directory_names, parse_overrides, plan
from seed_jax.runtime.logging import prepare_workdir

QUICKSTART = "configs/quickstart.py"


def problem(settings, overrides=None, config=QUICKSTART, workdir=Path("nowhere")) -> str:
    with pytest.raises(SweepError) as error:
        plan(config, settings, overrides or {}, workdir)
    return str(error.value)


# -- grids -------------------------------------------------------------------------------------------------------------


def test_product_varies_the_last_field_fastest():
    assert product({"a": (1, 2), "b": ("x", "y")}) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    assert product({}) == [{}] and product({"a": ()}) == []


def test_zipped_takes_values_together():
    assert zipped({"a": (1, 2), "b": (3, 4)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    with pytest.raises(ValueError, match=r"equally many values, got \{'a': 1, 'b': 2\}"):
        zipped({"a": (1,), "b": (3, 4)})


def test_chain_drops_what_came_before():
    assert chain(product({"a": (1, 2)}), [{"a": 2}, {"b": 3}], [{}]) == [{"a": 1}, {"a": 2}, {"b": 3}, {}]


def test_cross_joins_settings():
    assert cross([{"a": 1}, {}], [{"b": 2}, {"b": 3}]) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 2}, {"b": 3}]
    with pytest.raises(ValueError, match="name a field twice: a, a"):
        cross([{"a": 1}], [{"a": 2}])


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_can_run(name, tmp_path):
    sweep = SWEEPS[name]
    runs = plan(sweep.config, sweep.settings, {}, tmp_path)
    assert len(runs) == len(sweep.settings) == len({run.name for run in runs}) > 1
    assert not any(tmp_path.iterdir())
    for run in runs:
        for field, value in run.setting.items():
            if field != "method":
                *sections, last = field.split(".")
                node = run.config
                for section in sections:
                    node = node[section]
                assert node[last] == value


# -- configs -----------------------------------------------------------------------------------------------------------


def test_method_chooses_the_variant_and_overrides_come_on_top():
    config = build(QUICKSTART, {"method": "grpo", "optim.lr": 1}, {"iterations": "3", "eval.temperatures": "(0.5, 1)"})
    assert (config.method, config.distill.kind, config.hindsight.source) == ("grpo", "none", "none")
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    assert config.iterations == 3 and config.eval.temperatures == (0.5, 1)
    assert build(f"{QUICKSTART}:long", {}, {"log.tensorboard": "false"}).iterations == 60
    assert build(QUICKSTART, {}, {"model.init": "some/where"}).model.init == "some/where"


@pytest.mark.parametrize("text", ["", "0x1g", "[1", "'a'", "1.5", "true"])
def test_text_of_another_type_names_the_field(text):
    with pytest.raises(SweepError, match=r"iterations = .*: must be a int such as 8"):
        build(QUICKSTART, {}, {"iterations": text})


@pytest.mark.parametrize(("field", "value"), [("optim.lr", "fast"), ("seed", 1.0), ("distill.gate", 1), ("seed", True)])
def test_value_of_another_type_names_the_field(field, value):
    with pytest.raises(SweepError, match=rf"{field} = {value!r}: must be a"):
        build(QUICKSTART, {field: value}, {})


def test_nothing_on_the_command_line_is_ever_evaluated(tmp_path):
    with pytest.raises(SweepError, match="iterations"):
        build(QUICKSTART, {}, {"iterations": f"open({str(tmp_path / 'made')!r}, 'w')"})
    assert not (tmp_path / "made").exists()


# -- problems ----------------------------------------------------------------------------------------------------------


def test_all_problems_are_told_at_once_and_each_once():
    text = problem([{"distill.ceof": 1.0}, {"optim.lr": -1.0}, {"distill.ceof": 2.0}])
    assert text.splitlines()[0] == "nothing was started:"
    assert "- in ceof=1.0, ceof=2.0: unknown field distill.ceof; did you mean distill.coef?" in text
    assert "- in lr=-1.0: the config cannot work:\n  - optim.lr = -1.0: must be a number greater than 0" in text


def test_a_problem_of_all_settings_is_told_once():
    text = problem(product({"seed": (0, 1)}), {"model.init": "nowhere"})
    assert text == "nothing was started:\n- in every setting: model.init = 'nowhere': there is no such directory"


@pytest.mark.parametrize(
    ("settings", "overrides", "config", "message"),
    [
        ([{"method": "alchemy"}], {}, QUICKSTART, f"choose one of {', '.join(sorted(methods.PRESETS))}"),
        ([{"method": "grpo"}], {}, f"{QUICKSTART}:long", "names a method, and so does the sweep; leave out :long"),
        ([{}], {}, "configs/nowhere.py", "there is no config file configs/nowhere.py"),
        ([{}], {}, "configs/sweeps.py", "configs/sweeps.py has no get_config"),
        ([{}], {}, "configs/base.py:seed", "configs/base.py:seed: get_config() takes 0 positional arguments"),
        ([{"optim": 1}], {}, QUICKSTART, "unknown field optim; did you mean"),
        (
            [{"hindsight.source": "static_library", "hindsight.library": "lost"}],
            {},
            QUICKSTART,
            "there is no such folder",
        ),
        ([{"seed": 1}], {"seed": "2"}, QUICKSTART, "the sweep itself sets seed; leave out --config.seed"),
        ([{"seed": 1}, {"seed": 1}], {}, QUICKSTART, "has a setting twice: seed=1"),
        ([], {}, QUICKSTART, "the sweep has no settings"),
    ],
)
def test_problems(settings, overrides, config, message):
    assert message in problem(settings, overrides, config)


def test_directory_of_another_config(tmp_path):
    (run,) = plan(QUICKSTART, [{"seed": 1}], {}, tmp_path)
    prepare_workdir(tmp_path / run.name, run.config)
    assert plan(QUICKSTART, [{"seed": 1}], {"iterations": "99"}, tmp_path), "more iterations extend a run"
    text = problem([{"seed": 1}], {"optim.lr": "0.5"}, workdir=tmp_path)
    assert "seed=1 belongs to another config (optim.lr: 0.0001 -> 0.5); choose another --workdir" in text
    (tmp_path / run.name / "config.json").write_text("[")
    assert "config.json is not the config of a run" in problem([{"seed": 1}], workdir=tmp_path)


def test_overrides_of_the_command_line():
    assert parse_overrides(["--config.optim.lr=2e-6", "-config.a=b=c"]) == {"optim.lr": "2e-6", "a": "b=c"}
    for wrong in ("--optim.lr=1", "config.optim.lr=1", "--config.optim.lr", "more"):
        with pytest.raises(SweepError, match="cannot use the argument"):
            parse_overrides([wrong])
    with pytest.raises(SweepError, match=r"as in configs/quickstart\.py:grpo"):
        parse_overrides(["--config.method=grpo"])


# -- directories -------------------------------------------------------------------------------------------------------


def test_directories_are_named_by_what_changes():
    settings = [{"distill.coef": 0.01, "optim.lr": 1e-5}, {"loss.kl_coef": 0.0}, {}]
    assert directory_names(settings) == ["coef=0.01,lr=1e-05", "kl_coef=0.0", "unchanged"]
    assert directory_names([{"adv.eps": 1.0, "optim.eps": 2.0}]) == ["adv.eps=1.0,optim.eps=2.0"], "ambiguous"
    assert directory_names([{"eval.temperatures": (0.0, 0.4)}]) == ["temperatures=0.0+0.4"]


def test_paths_and_long_names_are_safe_and_distinct():
    paths = [{"hindsight.library": f"/data/../{'x' * 200}/{n}"} for n in range(2)] + [{"hindsight.library": "a b"}]
    names = directory_names(paths)
    assert len(set(names)) == 3 and all("/" not in name and " " not in name for name in names)
    assert all(len(name) <= MAX_NAME + 9 for name in names)
    assert directory_names([{"a": "x y"}, {"a": "x_y"}])[0].startswith("a=x_y-")


def test_sweeps_file_is_plain_data():
    for sweep in sweeps.SWEEPS.values():
        assert json.loads(json.dumps(sweep.settings)) and sweep.about
