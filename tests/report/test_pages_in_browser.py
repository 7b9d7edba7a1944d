"""The pages in a real browser, from files: filters, views, keys, hostile texts, size and time. Skipped without one."""

from __future__ import annotations

import random

import pytest

from launch import report
from seed_jax.report.runs import load_runs
from tests import browser as driver
from tests.report import fake_run

pytestmark = [pytest.mark.skipif(driver.find() is None, reason=driver.NEEDED), pytest.mark.slow]

MAX_BYTES, MAX_SECONDS = 5_000_000, 2.0


@pytest.fixture(scope="module")
def browser():
    with driver.browser() as opened:
        opened.view(1280, 900)
        yield opened


@pytest.fixture(autouse=True)
def no_problems(browser):
    browser.problems.clear()
    yield
    assert browser.problems == []


def shown(browser) -> int:
    return browser.run("document.querySelectorAll('#list .row').length")


_ROW_IS_SEEN = """(() => {
    const row = document.querySelector('.row[aria-current=true]').getBoundingClientRect();
    const list = document.getElementById('list').getBoundingClientRect();
    return row.top >= list.top - 2 && row.bottom <= list.bottom + 2;
})()"""


def test_same_game_has_a_button_for_each_episode(browser, tmp_path):
    workdir = fake_run.write(tmp_path / "run")
    fake_run.record(workdir, *(fake_run.episode(index=i, won=i == 0) for i in range(3)))
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    browser.open(tmp_path / "out" / "trajectories.html", "#1")
    names = browser.run("[...document.querySelectorAll('.times button')].map((b) => b.textContent)")
    assert names == ["iteration 1 \u2713", "iteration 1 \u2717", "iteration 1 \u2717 (2)", "Side by side"]


TITLES = "[...document.querySelectorAll('#episodes > *')].map((n) => n.querySelector('.facts, h3').textContent)"


def test_first_and_second_attempt_side_by_side_with_the_skill_between(browser, tmp_path):
    workdir = fake_run.write(tmp_path / "run")
    skill = "look in the <b>fridge</b> first"
    fake_run.record(workdir, *fake_run.attempts(skill, index=0), fake_run.episode(index=1, task="game1", goal="other"))
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    browser.open(tmp_path / "out" / "trajectories.html", "#0")
    browser.press("c")
    browser.wait("document.querySelectorAll('.episode').length === 2")
    first, between, second = browser.run(TITLES)
    assert "lost" in first and first.count("first attempt") == 1
    assert "won" in second and "second attempt" in second
    assert between == "Skill of the first attempt, which the policy read in the second"
    skills = "[...document.querySelectorAll('.skill .p')].map((p) => p.textContent)"
    assert browser.run(skills) == [skill], "it stands between them and nowhere else"
    left, middle, right = browser.run(
        "[...document.querySelectorAll('#episodes > *')].map((n) => n.getBoundingClientRect().left)"
    )
    assert left < middle < right and browser.run("document.documentElement.scrollWidth") == 1280
    browser.press("3")
    browser.wait("document.querySelectorAll('.skill').length === 2")
    assert browser.run(skills) == ["look elsewhere", skill]
    said = "[...document.querySelectorAll('.episode')].map((e) => e.querySelector('.readout').textContent)"
    first, second = browser.run(said)
    assert first.startswith("gap of the reply") and second.startswith("log-prob of the reply")
    browser.press("c")
    browser.wait("document.querySelectorAll('.episode').length === 1")
    assert not browser.run("document.getElementById('episodes').classList.contains('attempts')")


def test_second_attempt_alone(browser, tmp_path):
    """Without its first one, which a page of few episodes may lack: as the policy read it, in the one view it has."""
    workdir = fake_run.write(tmp_path / "run")
    _, second = fake_run.attempts("look there", index=0)
    fake_run.record(workdir, second, fake_run.episode(index=1, task="game1", goal="other"))
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    browser.open(tmp_path / "out" / "trajectories.html", "#0")
    browser.wait("document.querySelector('.skill .p').textContent === 'look there'")
    assert browser.run("[...document.querySelectorAll('#view button')].map((b) => b.disabled)") == [False, True, True]
    assert browser.run("document.querySelectorAll('.times').length") == 0
    browser.press("c")
    assert browser.run("document.querySelectorAll('.episode').length") == 1
    browser.run("document.getElementById('source').value = 'second'")
    browser.run("document.getElementById('source').dispatchEvent(new Event('change'))")
    browser.wait("document.getElementById('count').textContent === '1 of 2 episodes'")


def test_on_a_phone_the_chosen_episode_comes_into_view(browser, tmp_path):
    workdir = fake_run.write(tmp_path / "run")
    fake_run.record(workdir, *(fake_run.episode(index=i, goal=f"goal {i}") for i in range(12)))
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    browser.view(390, 844)
    try:
        browser.open(tmp_path / "out" / "trajectories.html", "#0")
        browser.click(".row[data-i='1']")
        browser.wait("document.querySelector('.episode h2').textContent === 'goal 1'")
        browser.wait("document.querySelector('.episode h2').getBoundingClientRect().bottom < innerHeight")
    finally:
        browser.view(1280, 900)


# -- what others write -------------------------------------------------------------------------------------------------

NASTY = [
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 1</script>",
    "</textarea><img src=x onerror='window.hit = 1'>",
    "<!-- \"quotes\" 'and' `more` ${window.hit = 1} &lt;b&gt;",
    "\u202eright to left\u202c \u2066isolate\u2069 \u200fmark",
    "line " * 20_000,
    "half a pair \ud83d and a null \x00",
]


def test_hostile_texts_are_shown_as_text(browser, tmp_path):
    workdir = fake_run.write(tmp_path / "run<img src=x onerror=alert(1)>", metrics={f"skill/rejected/{NASTY[1]}": 1})
    for i, text in enumerate(NASTY):
        one = fake_run.episode(
            index=i, goal=text[:200], family=text[:40], task=f"t{text[:60]}", skill=text, wrong_skill=text
        )
        one["turns"][0] |= {"observation": text, "command": text[:100], "kind": text[:50], "tokens": [text[:300]] * 4}
        again = fake_run.attempts(text, index=i, task=one["task"], iteration=2)
        fake_run.record(workdir, one, *again)
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    for page in sorted((tmp_path / "out").glob("*.html")):
        browser.open(page)
        assert browser.run("window.hit === undefined && document.images.length === 0"), page.name
    for i, text in enumerate(NASTY):
        browser.open(tmp_path / "out" / "trajectories.html", f"#{i}")
        seen = browser.run("document.querySelector('.observation').textContent")
        plain = text.strip() if i < 4 else ""
        assert plain in seen
        assert not set(seen) & set("\u202e\u202c\u2066\u2069\u200f\x00")
        browser.open(tmp_path / "out" / "trajectories.html", f"#{len(NASTY) + 2 * i + 1}")
        browser.press("c")
        browser.wait("document.querySelectorAll('.episode').length === 2")
        assert plain in browser.run("document.querySelector('.episodes > .skill .p').textContent")
        assert browser.run("window.hit === undefined && document.images.length === 0")
    browser.open(tmp_path / "out" / "trajectories.html", "#4")
    assert "\u27e8U+202E\u27e9right to left" in browser.run("document.querySelector('.observation').textContent")
    browser.open(tmp_path / "out" / "trajectories.html", "#5")
    assert browser.run("document.querySelector('.observation').textContent.length") < 2_000
    browser.click(".observation .more")
    assert "80000 more characters are left out" in browser.run("document.querySelector('.observation').textContent")


def test_five_hundred_long_episodes_open_fast_and_stay_small(browser, tmp_path):
    """Too much for one page, so some are left out: 20 turns of 100 tokens, all of them noise that hardly compresses."""
    rng = random.Random(0)
    words = [f" {''.join(rng.choices('abcdefghijklmnopqrstuvwxyz', k=rng.randint(1, 9)))}" for _ in range(4000)]
    workdir = fake_run.write(tmp_path / "run")
    for i in range(520):
        one = fake_run.episode(turns=20, iteration=i // 4 + 1, index=i, task=f"game{i // 20}", goal=f"clean cup {i}")
        for turn in one["turns"]:
            student = [round(-rng.expovariate(3), 3) for _ in range(100)]
            turn |= {
                "tokens": rng.choices(words, k=100),
                "student": student,
                "observation": "".join(rng.choices(words, k=40)),
            }
            for view in ("teacher", "wrong"):
                turn[view] = [round(s + rng.gauss(0, 0.3), 3) for s in student]
        fake_run.record(workdir, one)
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    page = tmp_path / "out" / "trajectories.html"
    assert page.stat().st_size < MAX_BYTES
    assert min(browser.open(page) for _ in range(2)) < MAX_SECONDS
    said = browser.run("document.querySelector('.browse .warning').textContent")
    count = int(said.split()[0])
    assert said.startswith(f"{count} of 520 recorded episodes are shown")
    assert browser.run("document.getElementById('count').textContent") == f"{count} of {count} episodes"
    assert shown(browser) <= 120  # further rows come when the list is scrolled
    browser.run("document.getElementById('list').scrollTop = 1e6")
    browser.wait("document.querySelectorAll('#list .row').length > 120")
    browser.open(page, f"#{count - 2}")  # far behind the first rows
    assert browser.run(_ROW_IS_SEEN)
    browser.press("j")
    browser.wait(f"document.querySelector('.row[aria-current=true]').dataset.i === '{count - 1}'")
    assert browser.run(_ROW_IS_SEEN) and browser.run("scrollY") == 0


def test_five_hundred_episodes_of_the_quickstarts_size_are_all_shown(browser, tmp_path):
    rng = random.Random(1)
    workdir = fake_run.write(tmp_path / "run")
    for i in range(500):
        one = fake_run.episode(turns=12, tokens=17, iteration=i // 8 + 1, index=i, task=f"game{i}")
        for turn in one["turns"]:
            for view in ("student", "teacher", "wrong"):
                turn[view] = [round(-rng.expovariate(2), 3) for _ in turn["tokens"]]
        fake_run.record(workdir, one)
    report.write(load_runs([workdir]), tmp_path / "out", draw=False)
    page = tmp_path / "out" / "trajectories.html"
    assert page.stat().st_size < MAX_BYTES
    assert min(browser.open(page) for _ in range(2)) < MAX_SECONDS
    assert browser.run("document.getElementById('count').textContent") == "500 of 500 episodes"
