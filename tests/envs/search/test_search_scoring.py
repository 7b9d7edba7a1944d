"""Exact match and its variants on cases judged by hand."""

from __future__ import annotations

import numpy as np
import pytest

from envs.search.scoring import (
    GoldError,
    exact_match,
    gold_answers,
    normalise,
    regex_match,
    sub_exact_match,
    summarize,
)

# prediction, golds, exact match, gold inside the prediction
CASES = [
    ("Paris", ["Paris"], True, True),
    ("paris", ["PARIS"], True, True),
    ("Paris.", ["Paris"], True, True),
    (" Paris \n", ["Paris"], True, True),
    ("Paris, France", ["Paris"], False, True),
    ("Paris", ["Paris, France"], False, False),
    ("Paris", ["London"], False, False),
    ("London", ["Paris", "London"], True, True),
    ("the Beatles", ["Beatles"], True, True),
    ("Beatles", ["The Beatles"], True, True),
    ("a Beatle", ["Beatles"], False, False),
    ("The The", ["a"], True, False),  # both are nothing without articles; nothing lies in nothing
    ("theatre", ["atre"], False, True),  # an article is a whole word only
    ("an apple a day", ["apple day"], True, True),
    ("1,234", ["1234"], True, True),
    ("1.234", ["1234"], True, True),
    ("12", ["123"], False, False),
    ("123", ["12"], False, True),
    ("May 18, 2018", ["May 18 , 2018"], True, True),
    ("18 May 2018", ["May 18, 2018"], False, False),
    ("U.S.", ["US"], True, True),
    ("U S", ["US"], False, False),
    ("O'Neill", ["ONeill"], True, True),
    ("O Neill", ["O'Neill"], False, False),
    ("rock-n-roll", ["rocknroll"], True, True),
    ("rock n roll", ["rock-n-roll"], False, False),
    ("1914–1918", ["19141918"], False, False),  # a dash outside of ASCII stays
    ("1914-1918", ["19141918"], True, True),
    ("1914–1918", ["1914–1918"], True, True),
    ("“Hamlet”", ["Hamlet"], False, True),  # so do typographic quotes
    ('"Hamlet"', ["Hamlet"], True, True),
    ("Röntgen", ["röntgen"], True, True),
    ("Rontgen", ["Röntgen"], False, False),
    ("ÉMILE ZOLA", ["Émile Zola"], True, True),
    ("yes", ["yes"], True, True),
    ("yes it was", ["yes"], False, True),
    ("no", ["yes"], False, False),
    ("", ["Paris"], False, False),
    ("", ["!"], True, False),  # both normalise to nothing
    ("anything", ["!!!"], False, False),
    ("anything", ["...", "anything"], True, True),
    (None, ["Paris"], False, False),
    ("new  york\tcity", ["New York City"], True, True),
    ("New York City", ["York"], False, True),
    ("New York", ["new york city", "NYC"], False, False),
    ("$5", ["5"], True, True),
    ("5 dollars", ["$5"], False, True),
    ("50%", ["50"], True, True),
    ("C++", ["C"], True, True),
    ("AC/DC", ["ACDC"], True, True),
    ("Wilhelm Conrad Röntgen", ["Wilhelm Conrad Röntgen", "Röntgen"], True, True),
    ("Dr. Wilhelm Röntgen", ["Wilhelm Röntgen"], False, True),
    ("北京", ["北京"], True, True),
]


@pytest.mark.parametrize(("prediction", "golds", "exact", "inside"), CASES)
def test_hand_made_cases(prediction, golds, exact, inside):
    assert exact_match(prediction, golds) is exact
    assert sub_exact_match(prediction, golds) is inside


def test_there_are_fifty():
    assert len({(prediction, *golds) for prediction, golds, _, _ in CASES}) >= 50


def test_forms_of_golds():
    for golds in ("Paris", b"Paris", ["Paris"], ("x", "Paris"), np.array(["x", "Paris"], object), np.array("Paris")):
        assert exact_match("paris", golds) and exact_match("paris", {"target": golds})
    for golds in (None, [], {}, {"target": None}, [None], [3], 3, np.array([])):
        with pytest.raises(GoldError):
            gold_answers(golds)


def test_regular_expressions_of_golds():
    assert regex_match("in 1912 or so", [r"19\d\d"]) and not regex_match("1812", [r"19\d\d"])
    assert not regex_match(None, ["x"])


def test_summary_is_micro_and_macro():
    rows = [("nq", "a b", "a b"), ("nq", "xy", "x"), ("nq", None, "x"), ("trivia", "q", ["q"])]
    found = summarize(rows)
    assert found["questions"] == 4 and found["micro_em"] == 2 / 4 and found["micro_sub_em"] == 3 / 4
    assert found["macro_em"] == (1 / 3 + 1) / 2 and found["sets"]["nq"] == {
        "questions": 3,
        "em": 1 / 3,
        "sub_em": 2 / 3,
    }
    assert normalise("The  Quick, an a!") == "quick"
