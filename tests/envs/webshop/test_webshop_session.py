"""The state machine: cases by hand, and random play against the rules written a second time."""

from __future__ import annotations

import random

import pytest
from tests_webshop import SHIRT, SHOES, goal_of

from envs.webshop.actions import SEARCH, Offered, arguments, parse
from envs.webshop.catalogue import derive
from envs.webshop.domain import MAX_CHARACTERS, WebshopDomain
from envs.webshop.generate import make_files
from envs.webshop.goals import make_goals
from envs.webshop.oracle import solve, wander
from envs.webshop.session import MAX_RESULTS, Session, Shop, goal_source, make

SHOP = Shop([SHIRT, SHOES])


@pytest.fixture(scope="module")
def generated():
    files = make_files()
    products, _ = derive(files)
    return Shop(products), make_goals(products, files, human=False), make_goals(products, files, human=True)


def play(*commands, form="text", product=SHIRT, **settings):
    session = Session(SHOP, goal_of(product), form, **settings)
    for command in commands:
        session.step(command)
    return session


ITEM = ("search[shirt]", "click[b0shirt]")
BUTTONS = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
OPTIONS = ["red", "navy blue", "features", "small", "x-large", "6 | 8"]

# commands -> page, what can be clicked, selected options, whether the last command did nothing
CASES = [
    ((), "search", ["search"], {}, False),
    (("click[search]",), "search", ["search"], {}, True),
    (("search[]",), "search", ["search"], {}, True),
    (("search[ ]",), "search", ["search"], {}, True),
    (("look around",), "search", ["search"], {}, True),
    (("buy[shirt]",), "search", ["search"], {}, True),
    (("search[shirt]",), "results", ["back to search", "next >", "b0shirt"], {}, False),
    (("search[SHIRT] now",), "results", ["back to search", "next >", "b0shirt"], {}, False),
    (("search[nowhere]",), "results", ["back to search", "next >"], {}, False),
    (("search[shirt]", "click[next >]"), "results", ["back to search", "< prev", "next >"], {}, False),
    (
        ("search[shirt]", "click[next >]", "click[< prev]"),
        "results",
        ["back to search", "next >", "b0shirt"],
        {},
        False,
    ),
    (("search[shirt]", "click[b0shoes]"), "results", ["back to search", "next >", "b0shirt"], {}, True),
    ((*ITEM, "click[red]"), "item", None, {"color": "red"}, False),
    ((*ITEM, "click[red]", "click[Navy Blue]"), "item", None, {"color": "navy blue"}, False),
    ((*ITEM, "click[red]", "click[6 | 8]"), "item", None, {"color": "red", "size": "6 | 8"}, False),
    ((*ITEM, "click[red]", "click[red]"), "item", None, {"color": "red"}, False),
    ((*ITEM, "click[features]"), "item", None, {"style": "features"}, False),  # the option hides the button
    ((*ITEM, "click[red]", "click[reviews]"), "reviews", ["back to search", "< prev"], {"color": "red"}, False),
    ((*ITEM, "click[red]", "click[description]", "click[< prev]"), "item", None, {"color": "red"}, False),
    ((*ITEM, "click[red]", "click[< prev]"), "results", ["back to search", "next >", "b0shirt"], {}, False),
    ((*ITEM, "click[red]", "click[back to search]"), "search", ["search"], {}, False),
    ((*ITEM, "click[red]", "search[shoes]"), "results", ["back to search", "next >", "b0shoes"], {}, False),
    ((*ITEM, "click[description]", "click[buy now]"), "description", ["back to search", "< prev"], {}, True),
    ((*ITEM, "click[red]", "click[buy now]"), "done", [], {"color": "red"}, False),
]


@pytest.mark.parametrize(("commands", "page", "clicks", "options", "no_op"), CASES)
def test_cases_by_hand(commands, page, clicks, options, no_op):
    session = play(*commands)
    clicks = [*BUTTONS, *(o for o in OPTIONS if o != "features")] if clicks is None else clicks
    offered = [f"click[{text}]" for text in clicks]
    assert session.page == page and session.options == options and session.no_op is no_op
    assert list(session.actions()) == ([SEARCH] if page == "search" else []) + offered


def test_purchases_end_the_episode():
    session = play(*ITEM, "click[navy blue]", "click[x-large]")
    bought = session.step("click[buy now]")
    assert bought.done and bought.won and bought.reward == 10.0 and dict(bought.measures) == {"score": 1.0}
    again = session.step("click[buy now]")
    assert again.done and again.won and again.reward == 0.0
    half = play(*ITEM).step("click[buy now]")
    assert half.done and not half.won and half.reward == 0.0 and dict(half.measures) == {"score": 2 / 4}
    strict = play(*ITEM, "click[buy now]", strict=True)
    with pytest.raises(ValueError, match="over"):
        strict.step("search[x]")
    assert strict.reset().text.startswith("WebShop [SEP] Instruction:") and strict.task_score == 0.0


def test_pages_as_text():
    intro = f"Instruction: [SEP] {goal_of(SHIRT).instruction_text} [SEP] "
    assert Session(SHOP, goal_of(SHIRT)).reset().text == f"WebShop [SEP] {intro}Search"
    results = play("search[shirt]").step("nothing").text
    assert results == (
        f"{intro}Back to Search [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] B0SHIRT [SEP] Acme Shirt (3) "
        "[SEP] $12.0 to $14.0"
    )
    item = play(*ITEM).step("click[red]").text
    options = (
        "color [SEP] red{} [SEP] navy blue [SEP] style [SEP] features [SEP] size [SEP] small [SEP] x-large [SEP] 6 | 8"
    )
    rest = (
        " [SEP] Acme Shirt (3) [SEP] Price: $12.0 to $14.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] "
        "Reviews [SEP] Buy Now"
    )
    head = f"{intro}Back to Search [SEP] < Prev [SEP] "
    assert item == head + options.format(" (selected)") + rest
    assert play(*ITEM, compat=True).step("click[red]").text == head + options.format("") + rest
    assert play(*ITEM).step("click[description]").text == f"{intro}Back to Search [SEP] < Prev [SEP] Made of cotton."
    assert (
        play("search[shoes]", "click[b0shoes]", product=SHOES)
        .step("click[features]")
        .text.endswith("< Prev [SEP] Soft soles [SEP] Laces")
    )
    shown = play(*ITEM, show_attributes=True)
    assert "Attributes [SEP] Buy Now" in shown.step("x").text
    assert shown.step("click[attributes]").text.endswith("[SEP] long sleeve")
    done = play(*ITEM, "click[red]").step("click[buy now]").text
    assert done.startswith("Thank you for shopping with us!") and 'B0SHIRT [SEP] options [SEP] {"color": "red"}' in done
    assert done.endswith("Your score (min 0.0, max 1.0) [SEP] 0.5")


def test_rich_pages():
    session = play("search[shirt]", form="text_rich")
    goal = goal_of(SHIRT).instruction_text
    head = f"Instruction:\n{goal}\n[button] Back to Search [button_]\nPage 1 (Total results: 1)\n"
    head += "[button] Next > [button_]\n"
    assert session.step("x").text == f"{head}\n[button] B0SHIRT [button_]\nAcme Shirt (3)\n$12.0 to $14.0"
    session.step("click[b0shirt]")
    item = session.step("click[red]").text
    assert item.startswith("You have clicked red.\nInstruction:\n")
    assert "\ncolor\n  [clicked button] red [clicked button_]\n  [button] navy blue [button_]\nstyle\n" in item
    assert "\n\n[clicked button] B0SHIRT [clicked button_]\n" in session.step("click[< prev]").text


class Rules:
    """The published state machine, a second time: what a page offers is spelled out, nothing is shared."""

    def __init__(self, shop):
        self.shop, self.page, self.hits, self.n, self.item, self.chosen = shop, "search", [], 1, None, {}

    def offers(self):
        if self.page == "search":
            return {"search": None}
        if self.page == "results":
            asins = [p.asin for p in self.hits[10 * self.n - 10 : 10 * self.n]]
            before = ["< prev"] if self.n > 1 else []
            return dict.fromkeys(["back to search", *before, "next >", *(a.lower() for a in asins)])
        if self.page == "item":
            texts = dict.fromkeys(["back to search", "< prev", "description", "features", "reviews", "buy now"])
            for name in self.item.options:
                for value in self.item.options[name]:
                    texts[value] = name
            return texts
        return {} if self.page == "done" else {"back to search": None, "< prev": None}

    def click(self, text):
        offers = self.offers()
        if text not in offers or text == "search":
            return
        if offers[text] is not None:
            self.chosen[offers[text]] = text
        elif text == "back to search":
            self.__init__(self.shop)
        elif text == "next >":
            self.n += 1
        elif text == "< prev" and self.page == "results":
            self.n -= 1
        elif text == "< prev" and self.page == "item":
            self.page, self.item, self.chosen = "results", None, {}
        elif text == "< prev":
            self.page = "item"
        elif text == "buy now":
            self.page = "done"
        elif text in ("description", "features", "reviews"):
            self.page = text
        else:
            self.page, self.item = "item", self.shop.products[text.upper()]

    def search(self, query):
        if query.strip():
            self.page, self.n, self.item, self.chosen = "results", 1, None, {}
            self.hits = [self.shop._order[i] for i, _ in self.shop.index.top(query.lower(), 50)]


def test_random_play_follows_the_rules(generated):
    shop, goals, _ = generated
    rng, pages = random.Random(0), set()
    for number in range(200):
        session, rules = Session(shop, goals[number]), Rules(shop)
        for _ in range(15):
            texts = [*rules.offers(), "buy now", "nonsense", "Next >"]
            if rng.random() < 0.25:
                query = rng.choice(["rain coat", "travel", goals[number].name.lower(), "zzz", "", "sturdy lamp"])
                session.step(f"search[{query}]")
                rules.search(query)
            else:
                text = rng.choice(texts)
                session.step(f"click[{text}]")
                rules.click(text.lower())
            assert (session.page, session.options) == (rules.page, rules.chosen)
            assert [a for a in session.actions() if a != SEARCH] == [f"click[{text}]" for text in rules.offers()]
            pages.add(session.page)
            if session.done:
                break
    assert len(pages) == 7


def test_an_oracle_reaches_every_goal_and_chance_does_not(generated):
    shop, goals, human = generated
    assert len(goals) > 2500 and len(human) > 200
    for goal in (*goals, *human):
        assert solve(Session(shop, goal)) == 1.0, goal
    rng, scores = random.Random(0), []
    for goal in goals[:300]:
        session = Session(shop, goal)
        wander(session, rng)
        scores.append(session.task_score)
    assert sum(scores) / 300 < 0.15 and sum(s == 1.0 for s in scores) <= 3


def test_search_rules(generated):
    shop, goals, _ = generated
    assert len(shop.find("travel")) == MAX_RESULTS and len(shop.find("<c> grocery")) > MAX_RESULTS
    assert {p.category for p in shop.find("<c> grocery")} == {"grocery"} and shop.find("<c>") == ()
    assert all("low sugar" in p.attributes for p in shop.find("<a> low sugar")) and shop.find("<a> none such") == ()
    assert {p.query for p in shop.find("<q> rain coat")} == {"rain coat"}
    assert shop.find("<r>", "one") == shop.find("<r>", "one") != shop.find("<r>", "two")
    session = Session(shop, goals[0])
    session.step(f"search[{'rain ' * 200}]")
    assert session.page == "results" and session.found == shop.find("rain")


def test_a_task_carries_its_goal(generated):
    shop, goals, _ = generated
    again = make(goal_source(goals[0]), shop)
    assert again.goal == goals[0] and again.reset() == Session(shop, goals[0]).reset()
    with pytest.raises(ValueError, match="text_rich"):
        Session(shop, goals[0], "html")


@pytest.mark.parametrize(
    ("reply", "command", "valid"),
    [
        ("<think>go</think><action>search[red shoes]</action>", "search[red shoes]", True),
        ("<think>go</think><action>click[Buy Now]</action>", "click[buy now]", True),
        ("<action>click[b00x]</action>", "click[b00x]", False),
        ("<think>go</think>search[red shoes]", None, False),
        ("<think>go</think><action>click[<b>]</action>", "click[<b>]", True),
        ("<think>go</think><action>看</action>", "看", False),
    ],
)
def test_replies(reply, command, valid):
    assert parse(reply) == (command, valid)


def test_commands_and_offers():
    assert arguments("search[a b] and more") == ("search", "a b") and arguments("click[B0X]") == ("click", "b0x")
    assert arguments("click[]") is None and arguments("click") is None and arguments("[x]") is None
    assert arguments("click[a[b]]") == ("click[a", "b]"), "greedy: the last opening bracket counts"
    offered = Offered([SEARCH, "click[search]"])
    assert "search[anything]" in offered and "click[search]" in offered
    assert SEARCH not in offered and "search[]" not in offered and "click[x]" not in offered
    assert "search[x]" not in Offered(["click[x]"]) and None not in offered


def test_prompts():
    domain, session = WebshopDomain("released"), play("search[shirt]")
    first = Session(SHOP, goal_of(SHIRT)).reset()
    task = domain.goal(first.text)
    assert task == goal_of(SHIRT).instruction_text == domain.goal(play(form="text_rich").reset().text)
    page = session.step("x")
    history = [(first.text, "search[shirt]", page.text)]
    text = domain.prompt(task, history, page.text, page.admissible, 2)
    assert f"Your task is to: {task}.\n" in text and "[Observation 1: ''Search'', Action 1: 'search[shirt]']" in text
    assert "'Back to Search' [SEP] 'Page 1 (Total results: 1)' [SEP] 'Next >'" in text
    assert "\n'click[back to search]',\n'click[next >]',\n'click[b0shirt]',\n" in text
    assert "Observation 1" not in domain.prompt(task, history, page.text, page.admissible, 0)
    long = [(first.text + " [SEP] " + "x" * MAX_CHARACTERS, "search[shirt]", page.text)]
    assert "Observation 1" not in domain.prompt(task, long, page.text, page.admissible, 2)
    compact = WebshopDomain("compact").prompt(task, history, page.text, page.admissible, 2)
    assert compact.splitlines()[:2] == [f"your task is to: {task}", "history: search[shirt]"]
