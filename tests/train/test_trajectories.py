"""What the trajectory page is made of: which episodes, whose log-probs, texts of tokens."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import quickstart
from launch import report
from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.models.spec import init_params
from seed_jax.report.runs import load_runs
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import scoring, trajectories
from seed_jax.train.packing import Sample, pack_rows, shape_of
from seed_jax.train.state import TrainState
from seed_jax.types import Episode, Skill, Turn
from tests import browser as driver
from tests import tiny


def episode(
    index: int, group: int = 0, won: bool = False, goal: str = "a", family: str = "f", skill: str | None = None
):
    turn = Turn("", [1], [2], np.zeros(1), "", "", None, True, True)
    return Episode(
        f"t{group}", family, goal, group, index, turns=[turn], won=won, skill=skill and Skill("", skill, ())
    )  # fmt: skip


# -- which episodes ----------------------------------------------------------------------------------------------------


def test_pairs_hold_both_outcomes_and_are_spread_over_the_groups():
    won = {(0, 2), (1, 0), (1, 1), (3, 1)}
    played = [episode(3 * g + i, g, won=(g, i) in won) for g in range(4) for i in range(3)]
    assert [e.index for e in trajectories.pick_pairs(played, 4)] == [2, 0, 6, 7]  # groups 0 (mixed) and 2 (all lost)
    assert [e.index for e in trajectories.pick_pairs(played, 3)] == [2, 0, 6]
    assert [e.index for e in trajectories.pick_pairs(played, 100)] == [2, 0, 3, 5, 6, 7, 10, 9]
    broken = [dataclasses.replace(played[0], error="lost"), dataclasses.replace(played[1], turns=[])]
    assert trajectories.pick_pairs(broken, 4) == []


def second(index: int, first: Episode, won: bool = False) -> Episode:
    of = {"index": index, "won": won, "given": first.skill, "attempt_of": first.index, "skill": None}
    return dataclasses.replace(first, **of)


def test_a_second_attempt_is_recorded_behind_its_first_one():
    won = {(0, 2), (1, 0), (1, 1), (3, 1)}
    played = [episode(3 * g + i, g, won=(g, i) in won, skill="s") for g in range(4) for i in range(3)]
    again = [second(20, played[1]), second(21, played[9]), second(22, played[10]), second(23, played[9], won=True)]
    numbers = lambda count: [e.index for e in trajectories.pick_pairs(played + again, count)]  # noqa: E731
    # group 0: what won, and of the lost ones that which was tried again; group 3: both were, the lost one is shown
    assert numbers(6) == [2, 1, 20, 10, 9, 21]
    assert numbers(5) == [2, 1, 20, 10, 9]
    assert numbers(3) == [2, 1, 20] and numbers(1) == [2]
    assert numbers(12) == [2, 1, 20, 10, 9, 21, 3, 5, 6, 7], "then groups without second attempts"
    lost = [dataclasses.replace(again[0], error="lost"), dataclasses.replace(again[1], turns=[])]
    assert [e.index for e in trajectories.pick_pairs(played + lost, 4)] == [2, 0, 6, 7]


def test_a_second_attempt_has_no_wrong_skill():
    first, other = episode(0, goal="a", skill="one"), episode(1, 1, goal="b", skill="two")
    again = second(2, first)
    assert trajectories.wrong_skills([first, again], [first, other, again]) == [other.skill, None]


def test_panel_takes_families_in_turn():
    played = [episode(i, i, family=f) for i, f in enumerate("aaabbc")]
    assert [e.index for e in trajectories.pick_panel(played, 4)] == [0, 3, 5, 1]
    assert trajectories.pick_panel(played, 0) == []


def test_wrong_skill_is_of_the_next_other_goal_with_another_text():
    played = [
        episode(0, goal="a", skill="one"), episode(1, goal="a", skill="two"), episode(2, goal="b", skill="one"),
        episode(3, goal="b"), episode(4, goal="c", skill="three"),
    ]  # fmt: skip
    found = trajectories.wrong_skills([played[0], played[3], played[4]], played)
    assert [skill.text for skill in found] == ["three", "three", "one"]
    assert trajectories.wrong_skills(played[:2], played[:2]) == [None, None]


# -- texts of tokens ---------------------------------------------------------------------------------------------------


def test_token_texts_add_up_to_the_reply():
    words = tiny.tokenizer()
    ids = words("<think> go to shelf 1 . </think> <action> go to shelf 1 </action>", add_special_tokens=False)[
        "input_ids"
    ]
    ids.append(words.eos_token_id)
    texts = tok.token_texts(words, ids)
    assert len(texts) == len(ids) and "".join(texts) == words.decode(ids)
    assert "shelf 1" in [text.strip() for text in texts] and texts[-1].strip() == "<eos>"


def test_a_character_of_several_tokens_stands_at_its_last_one():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = bytewise("aé 🚀b")["input_ids"]
    assert tok.token_texts(bytewise, ids) == ["a", "", "é", " ", "", "", "", "🚀", "b"]
    cut = tok.token_texts(bytewise, ids[:-2])  # the reply ends inside the rocket
    assert len(cut) == len(ids) - 2 and "".join(cut) == bytewise.decode(ids[:-2])


# -- log-probs ---------------------------------------------------------------------------------------------------------


def scorer_setup(mesh, **changes):
    words = tiny.tokenizer()
    config = quickstart.get_config("seed")
    config.update_from_flattened_dict({"model.init": "unused", **changes})
    spec = tiny.spec(len(words))
    params = init_params(spec, jax.random.PRNGKey(0))
    return SimpleNamespace(config=config, spec=spec, mesh=mesh, shape=shape_of(config.pack)), params


def test_weights_stay_split_and_the_numbers_are_those_of_one_device():
    """Eight devices, with the model's functions placed as on a TPU: no device ever holds a stacked weight whole."""
    mesh = sharding.make_mesh(jax.devices())
    samples = random_samples(1, 9, 20, 13, 7)
    run, params = scorer_setup(mesh)
    one, _ = scorer_setup(sharding.make_mesh(jax.devices()[:1]))
    placed = jax.device_put(params, sharding.param_shardings(run.spec, mesh, "train"))
    alone = trajectories.Scorer(one, state_of(params))("student", samples)
    among = trajectories.Scorer(run, state_of(placed))
    assert among.weights["student"] is placed, "no copy is made"
    among.options["mesh"] = mesh
    for mine, theirs, sample in zip(alone, among("teacher", samples), samples, strict=True):
        assert len(mine) == len(sample.response)
        np.testing.assert_allclose(mine, theirs, atol=1e-5)

    rows = pack_rows([[sample] for sample in samples] + [[]] * (among.rows - len(samples)), among.shape)[0]
    rows = jax.device_put(rows, among.split)
    lowered = scoring._row_logprobs.lower(placed, rows, run.spec, among.split, tuple(sorted(among.options.items())))
    program = lowered.compile().as_text()
    for weight in (params["layers"][name] for name in ("q", "o", "gate", "up")):
        assert f"f32[{','.join(map(str, weight.shape))}]" not in program


def random_samples(*lengths: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [Sample(rng.integers(5, 90, 40).tolist(), rng.integers(5, 90, n).tolist()) for n in lengths]


def state_of(params) -> TrainState:
    return TrainState(params=params, opt_state=None, step=None)


@pytest.mark.parametrize("teacher, expected", [
    ("old", "params"), ("current", "params"), ("frozen_init", "reference"), ("ema", "teacher"), ("periodic", "teacher"),
])  # fmt: skip
def test_teacher_has_the_weights_of_the_updates_teacher(teacher, expected):
    run, params = scorer_setup(sharding.make_mesh(jax.devices()[:1]), **{"distill.teacher": teacher})
    state = TrainState(params, None, None, reference={"r": 1}, teacher={"t": 1})
    scorer = trajectories.Scorer(run, state)
    assert scorer.weights["teacher"] is getattr(state, expected) and scorer.weights["student"] is params


# -- records of a run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(model_dir, tmp_path_factory, planner_skills):
    """A run whose trajectories hold every training episode."""
    config = tiny.config(model_dir)
    config.old_logprobs = "recompute"
    config.log.trajectories_per_iteration = config.rollout.tasks * config.rollout.group
    config.log.diagnostics_episodes, config.log.tensorboard = 0, False
    workdir = tmp_path_factory.mktemp("recorded")
    tiny.run(config, workdir)
    return workdir


@pytest.mark.slow
def test_gaps_are_those_that_the_update_saw(recorded):
    records, metrics = read_jsonl(recorded / "trajectories.jsonl"), read_jsonl(recorded / "metrics.jsonl")
    assert [r["iteration"] for r in records] == [1] * 6 + [2] * 6
    for metric in metrics:
        turns = [
            turn for r in records if r["iteration"] == metric["iteration"] for turn in r["turns"] if "teacher" in turn
        ]
        gaps = np.concatenate([np.array(turn["teacher"]) - np.array(turn["student"]) for turn in turns])
        assert np.abs(gaps).max() > 0.01
        assert gaps.mean() == pytest.approx(metric["opd/gap_mean"], abs=5e-4)  # three digits in the file
        assert np.abs(gaps).mean() == pytest.approx(metric["opd/gap_size"], abs=1e-3)


@pytest.mark.slow
def test_records_say_what_the_episodes_say(recorded):
    records = read_jsonl(recorded / "trajectories.jsonl")
    episodes = {(e["iteration"], e["index"]): e for e in read_jsonl(recorded / "episodes.jsonl")}
    views = set()
    for record in records:
        same = episodes[record["iteration"], record["index"]]
        for name in ("task", "goal", "won", "skill", "skill_error", "given_skill"):
            assert record[name] == same[name], name
        for turn, expected in zip(record["turns"], same["turns"], strict=True):
            assert (turn["observation"], turn["command"]) == (expected["observation"], expected["command"])
            assert "".join(turn["tokens"]).replace("<eos>", "").strip() == expected["response"].strip()
            assert all(len(turn[v]) == len(turn["tokens"]) for v in ("student", "teacher", "wrong") if v in turn)
            assert ("teacher" in turn) == (record["skill"] is not None)
            assert ("wrong" in turn) == (record["wrong_skill"] is not None)
            views |= turn.keys()
            if "action" in turn and turn["admissible"]:
                start, stop = turn["action"]
                assert "".join(turn["tokens"][start:stop]).strip() == turn["command"]
    assert {"teacher", "wrong", "thought", "action", "kind"} <= views


@pytest.mark.slow
def test_panel_games_are_the_same_at_every_evaluation(recorded):
    records = read_jsonl(recorded / "trajectories_panel.jsonl")
    games = {i: [r["task"] for r in records if r["iteration"] == i] for i in (0, 2)}
    assert games[0] == games[2] and len(set(games[0])) == 2
    outcomes = read_jsonl(recorded / "outcomes.jsonl")
    evaluations = read_jsonl(recorded / "evaluations.jsonl")
    for result, evaluation in zip(outcomes, evaluations, strict=True):
        assert (result["iteration"], result["temperature"]) == (evaluation["iteration"], evaluation["temperature"])
        assert np.mean([o["won"] for o in result["outcomes"]]) == evaluation["success_rate"]


# -- the pages of that run, in a browser -------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(driver.find() is None, reason=driver.NEEDED)


@pytest.fixture(scope="module")
def pages(recorded, tmp_path_factory):
    out = tmp_path_factory.mktemp("pages")
    report.write(load_runs([recorded]), out, draw=False)
    return out


@pytest.fixture(scope="module")
def opened():
    with driver.browser() as tab:
        yield tab


@pytest.fixture
def browser(opened):
    opened.view(1280, 900)
    opened.problems.clear()
    yield opened
    assert opened.problems == []


def shown(browser) -> int:
    return browser.run("document.querySelectorAll('#list .row').length")


def choose(browser, name: str, value: str) -> None:
    browser.run(
        f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}'; "
        "e.dispatchEvent(new Event('change')); })()"
    )


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (390, False)])
def test_run_page(browser, pages, tmp_path, width, dark):
    browser.view(width, 844, dark)
    browser.open(pages / "index.html")
    assert browser.run("document.querySelectorAll('svg.chart').length") >= 9
    assert browser.run("document.documentElement.scrollWidth") == width  # only tables scroll sideways
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 21, 25)") == dark
    assert browser.screenshot(tmp_path / "run.png").stat().st_size > 20_000


@in_browser
@pytest.mark.slow
def test_theme_button_turns_dark_and_back(browser, pages):
    browser.open(pages / "index.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(colour)
    browser.click("#theme")
    assert browser.run(colour) != before
    browser.click("#theme")
    assert browser.run(colour) == before


@in_browser
@pytest.mark.slow
def test_tables_can_be_copied(browser, pages):
    browser.open(pages / "index.html")
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.click(".wide button.copy")
    browser.wait("document.querySelector('.wide button.copy').textContent === 'Copied'")
    copied = browser.run("navigator.clipboard.readText()")
    rows = [line.split("\t") for line in copied.splitlines()]
    assert rows[0][:2] == ["decision", "turns"] and len(rows) > 2 and len({len(row) for row in rows}) == 1


@in_browser
@pytest.mark.slow
def test_filters_and_search(browser, pages):
    browser.open(pages / "trajectories.html")
    everything = shown(browser)
    assert everything == 16  # six in each of two iterations, two panel games at two evaluations
    for name, value, count in (("source", "panel", 4), ("source", "training", 12), ("iteration", "0", 2)):
        choose(browser, name, value)
        browser.wait(f"document.querySelectorAll('#list .row').length === {count}")
        choose(browser, name, "")
    choose(browser, "outcome", "won")
    browser.wait("document.querySelectorAll('#list .row .lost').length === 0")
    won = shown(browser)
    choose(browser, "outcome", "lost")
    browser.wait("document.querySelectorAll('#list .row .won').length === 0")
    assert won + shown(browser) == everything
    choose(browser, "outcome", "")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "search"
    for letter in "no such words":
        browser.press(letter)
    browser.wait("document.getElementById('count').textContent.startsWith('0 of')")
    assert "No episode matches" in browser.run("document.getElementById('episodes').textContent")


@in_browser
@pytest.mark.slow
def test_views_colours_and_keys(browser, pages, tmp_path):
    browser.open(pages / "trajectories.html")
    colours = "[...document.querySelectorAll('.tok')].map((t) => t.style.backgroundColor).join('|')"
    pressed = "document.querySelector('#view [aria-pressed=true]').dataset.view"
    looks = {}
    for view in ("teacher", "wrong", "student"):
        browser.click(f"#view [data-view={view}]")
        browser.wait(f"{pressed} === '{view}'")
        looks[view] = browser.run(colours)
        assert browser.run("document.querySelector('.skill').textContent")
        assert browser.screenshot(tmp_path / f"{view}.png", whole=False).stat().st_size > 20_000
    assert len(set(looks.values())) == 3
    browser.press("2")
    browser.wait(f"{pressed} === 'teacher'")
    browser.press("g")
    browser.wait("document.querySelector('#color [aria-pressed=true]').dataset.color === 'gate'")
    assert browser.run(colours) != looks["teacher"]
    first = browser.run("document.querySelector('.row[aria-current=true]').dataset.i")
    browser.press("j")
    browser.wait(f"document.querySelector('.row[aria-current=true]').dataset.i !== '{first}'")
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    assert "policy" in browser.run("document.querySelector('.readout').textContent")
    assert browser.run("document.querySelectorAll('.tok.at').length") == 1


@in_browser
@pytest.mark.slow
def test_same_game_before_and_after_side_by_side(browser, pages):
    browser.open(pages / "trajectories.html", "#0")
    titles = "[...document.querySelectorAll('.episode .facts')].map((f) => f.textContent)"
    assert "before training" in browser.run(titles)[0]
    browser.press("c")
    browser.wait("document.querySelectorAll('.episode').length === 2")
    before, after = browser.run(titles)
    assert "before training" in before and "after 2 iterations" in after
    browser.press("c")
    browser.wait("document.querySelectorAll('.episode').length === 1")
