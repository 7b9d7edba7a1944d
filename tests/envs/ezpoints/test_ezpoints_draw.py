"""Pictures of cards and formulas, read back; and what happens without Pillow or the font."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from envs.ezpoints import draw
from envs.ezpoints.deal import RANKS, SUITS, Card, panel
from envs.ezpoints.game import EzpointsGame, make

DECK = [Card(rank, suit) for rank in RANKS for suit in SUITS]
PLACES = [np.s_[top : top + draw.CARD_PX[1], left : left + draw.CARD_PX[0]] for left, top in draw.CARDS_AT]
BELOW = np.s_[draw.FORMULA_AT[1] :, :]


@pytest.fixture(scope="module")
def faces() -> dict[Card, np.ndarray]:
    """How each card looks in the first place."""
    return {card: draw.picture((card, card), ())[PLACES[0]] for card in DECK}


def read_back(image: np.ndarray, faces: dict[Card, np.ndarray]) -> list[Card]:
    return [next(card for card in DECK if np.array_equal(image[place], faces[card])) for place in PLACES]


def test_pictures_show_the_cards_and_the_formula(faces):
    for cards in panel("unseen")[::5]:
        game = EzpointsGame(cards, pictures=True)
        shown = [game.reset(), *(game.step(symbol) for symbol in (str(cards[1].value), "+"))]
        for seen in shown:
            assert seen.image.shape == (300, 300, 3) and seen.image.dtype == np.uint8
            assert read_back(seen.image, faces) == list(cards)
            assert (seen.image[0] == draw.TABLE).all() and (seen.image[-1] == draw.TABLE).all()
        formulas = [seen.image[BELOW] for seen in shown]
        assert not any(np.array_equal(a, b) for a, b in itertools.combinations(formulas, 2))
    assert make({"cards": [["2", "hearts"], ["J", "spades"]]}).reset().image is None


def test_every_card_looks_different(faces):
    """Also the four suits of a rank and the ranks of a suit: by 150 pixels or more."""
    for a, b in itertools.combinations(DECK, 2):
        assert (abs(faces[a].astype(int) - faces[b]).max(axis=-1) > 60).sum() > 150, (a, b)


def test_every_formula_looks_different():
    cards, pictures = (Card("2", "hearts"), Card("10", "spades")), set()
    symbols = [s for n in range(4) for s in itertools.product(("2", "10", "+", "*", "="), repeat=n)]
    for written in symbols:
        pictures.add(draw.picture(cards, written)[BELOW].tobytes())
    assert len(pictures) == len(symbols)


def test_red_and_black_suits(faces):
    for card in DECK:
        red = (abs(faces[card].astype(int) - (200, 24, 36)).max(axis=-1) < 40).sum()
        assert red > 800 if card.suit in ("diamonds", "hearts") else red == 0


def test_the_longest_formula_fits():
    written = draw.picture((Card("6", "clubs"), Card("6", "clubs")), ["10", "+", "10", "+", "10", "="])
    assert (written[:, -5:] == draw.TABLE).all()


def test_the_same_picture_every_time():
    cards = (Card("2", "hearts"), Card("10", "spades"))
    before = draw.picture(cards, ["2"]).copy()
    draw._face.cache_clear(), draw._font.cache_clear()
    assert np.array_equal(draw.picture(cards, ["2"]), before)


def test_a_font_that_cannot_be_read(tmp_path):
    """One warning, and Pillow's own font."""
    cards, path = (Card("2", "hearts"), Card("10", "spades")), tmp_path / "font.ttf"
    path.write_text("no font")
    with pytest.warns(UserWarning, match=r"env\.font = .*font\.ttf' cannot be read") as caught:
        pictures = [draw.picture(cards, ["2"], str(path)) for _ in range(3)]
    assert len(caught) == 2, "one for each size"
    assert all(np.array_equal(image, draw.picture(cards, ["2"])) for image in pictures)


def test_without_pillow():
    """Text works, and pictures say what to do."""
    program = (
        "import sys\n"
        "sys.modules['PIL'] = None\n"
        "from envs.ezpoints.game import make\n"
        "from envs.ezpoints.draw import PillowMissing\n"
        "source = {'cards': [['2', 'hearts'], ['J', 'spades']]}\n"
        "assert make(source).reset().text\n"
        "try:\n"
        "    make(source, pictures=True)\n"
        "except PillowMissing as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "pictures of cards need Pillow: pip install pillow, or set env.observation='text'\n", ended
