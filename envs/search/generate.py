"""An encyclopedia of a world that does not exist, with questions on it: answers cannot be known, only found.

Train, dev and test ask about different entities, and every entity of the three is in the one corpus, beside others
that nothing is asked about.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from envs.search.retrieval import Passage

VERSION = 1  # of what a seed gives
SEED = 233
# Families (of people, towns, firms, books, rivers; 11 passages each) in the world of each split; "rest" is not asked.
WORLDS = {"train": 92, "dev": 30, "test": 46, "rest": 15}
ONE_HOP, TWO_HOP = "encyclopedia_1hop", "encyclopedia_2hop"
_MONTHS = "January February March April May June July August September October November December".split()
_STARTS = (
    "Bar Cel Dor Elm Fen Gra Hol Ith Jor Kal Lun Mar Nor Osk Pel Quin Ros Sul Tam Ulv Vor Wen Yar Zel Bö Éli".split()
)
_MIDDLES = "a e i o u an er il or ö é".split()
_ENDS = {"town": "burg stad wick mere dal holm", "person": "sen vik man ter ska rin", "river": "na va lo ra mis dra"}
_FIRST = (
    "Ada Bela Cyr Dana Edo Fila Goro Hedy Ivo Jana Kato Lina Milo Nora Oto Pia Rolf Søren Tova Uma Vito Zoë".split()
)
_TRADES = ("botanist", "engineer", "poet", "surveyor", "composer", "glassmaker", "astronomer", "printer")
_GOODS = ("clocks", "lenses", "ropes", "kilns", "sails", "looms", "pumps", "lanterns")
_TOPICS = ("Harbour", "Winter", "Orchard", "Lantern", "Mountain", "Mirror", "Garden", "Bridge")
_KINDS = ("Songs of the", "Letters from the", "A History of the", "The Last", "Beyond the", "Notes on the")


class Question(NamedTuple):
    """golds: all accepted answers; queries: what to search for, one after the other, to know."""

    id: str
    question: str
    golds: list[str]
    data_source: str
    queries: list[str]


class Encyclopedia(NamedTuple):
    passages: list[Passage]
    questions: dict[str, list[Question]]  # split -> questions
    entities: dict[str, set[str]]  # split -> names that its questions and their answers are about


class Names:
    """Names that come once in the whole encyclopedia."""

    def __init__(self, rng: random.Random):
        self._rng, self._used = rng, set()

    def new(self, kind: str) -> str:
        while True:
            rng = self._rng
            name = rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice("bdgklmnrstv") + rng.choice(_MIDDLES)
            name += rng.choice(_ENDS[kind].split())
            if name not in self._used:
                self._used.add(name)
                return name


class Person(NamedTuple):
    first: str
    middle: str  # an initial
    last: str
    trade: str
    born: tuple[int, int, int]  # year, month, day
    town: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    def aliases(self) -> list[str]:
        return [
            self.name,
            f"{self.first} {self.middle}. {self.last}",
            f"{self.first[0]}. {self.last}",
            f"{self.last}, {self.first}",
        ]


def make(seed: int = SEED) -> Encyclopedia:
    rng = random.Random(seed)
    names, passages = Names(rng), []
    questions: dict[str, list[Question]] = {}
    entities: dict[str, set[str]] = {}
    for split, families in WORLDS.items():
        asked: list[tuple[str, list[str], str, list[str]]] = []
        titles: set[str] = set()
        for _ in range(families):
            family = _Family(rng, names)
            texts = list(family.passages())
            passages += texts
            titles |= {title for title, _ in texts}
            asked += family.questions(rng)
        if split != "rest":
            rng.shuffle(asked)
            questions[split] = [Question(f"{split}/{n:05d}", *entry) for n, entry in enumerate(asked)]
            entities[split] = titles
    rng.shuffle(passages)
    numbered = [Passage(str(number), title, text) for number, (title, text) in enumerate(passages)]
    return Encyclopedia(numbered, questions, entities)


class _Family:
    """Two towns, two rivers, three people, two firms, two books, and how they hang together."""

    def __init__(self, rng: random.Random, names: Names):
        self.towns = [names.new("town") for _ in range(2)]
        self.rivers = [names.new("river") for _ in range(2)]
        surname = names.new("person")  # of two of the three: search must tell them apart
        firsts = rng.sample(_FIRST, 3)
        self.people = [
            Person(first, rng.choice("ABCDEFGHKLM"), last, rng.choice(_TRADES), _date(rng), rng.choice(self.towns))
            for first, last in zip(firsts, (surname, surname, names.new("person")), strict=True)
        ]
        self.firms = [f"{names.new('person')} Works" for _ in range(2)]
        self.founders = rng.sample(self.people, 2)
        self.founded = rng.sample(range(1790, 1990), 2)
        self.books = [f"{rng.choice(_KINDS)} {rng.choice(_TOPICS)} of {names.new('town')}" for _ in range(2)]
        self.authors = rng.sample(self.people, 2)
        self.pages = [rng.randint(101, 999) for _ in range(2)]
        self.lengths = [rng.randint(1001, 4999) for _ in range(2)]
        self.inhabitants = [rng.randint(10_001, 99_999) for _ in range(2)]
        self.goods = rng.sample(_GOODS, 2)

    def passages(self) -> Iterator[tuple[str, str]]:
        for town, river, inhabitants in zip(self.towns, self.rivers, self.inhabitants, strict=True):
            yield (
                town,
                f"{town} is a town on the river {river}. It has {inhabitants:,} inhabitants and a market square.",
            )
        for river, town, length in zip(self.rivers, self.towns, self.lengths, strict=True):
            yield (
                river,
                f"The {river} is a river that is {length:,} kilometres long. It flows through {town} to the sea.",
            )
        for person in self.people:
            text = f"{person.first} {person.middle}. {person.last} was a {person.trade}, born on {_day(person.born)}"
            yield person.name, f"{text} in {person.town}. Little is known of the early years."
        for firm, founder, year, goods in zip(self.firms, self.founders, self.founded, self.goods, strict=True):
            yield firm, f"{firm} is a maker of {goods}. It was founded in {year} by {founder.name}."
        for book, author, pages in zip(self.books, self.authors, self.pages, strict=True):
            yield book, f"{book} is a book of {pages} pages by {author.name}. It was printed in two editions."

    def questions(self, rng: random.Random) -> list[tuple[str, list[str], str, list[str]]]:
        return [*self._one_hop(), *self._two_hop(), *self._yes_no(rng)]

    def _one_hop(self) -> Iterator[tuple[str, list[str], str, list[str]]]:
        for town, river, inhabitants in zip(self.towns, self.rivers, self.inhabitants, strict=True):
            yield f"On which river does {town} lie?", [river, f"{river} river", f"river {river}"], ONE_HOP, [town]
            yield f"How many inhabitants does {town} have?", [f"{inhabitants:,}"], ONE_HOP, [town]
        for river, length in zip(self.rivers, self.lengths, strict=True):
            golds = [f"{length:,}", f"{length:,} km", f"{length:,} kilometres"]
            yield f"How many kilometres long is the river {river}?", golds, ONE_HOP, [river]
        for person in self.people:
            yield f"When was {person.name} born?", _dates(person.born), ONE_HOP, [person.name]
        for firm, founder in zip(self.firms, self.founders, strict=True):
            yield f"Who founded {firm}?", founder.aliases(), ONE_HOP, [firm]

    def _two_hop(self) -> Iterator[tuple[str, list[str], str, list[str]]]:
        for book, author in zip(self.books, self.authors, strict=True):
            hops = [book, author.name]
            yield f"In which town was the author of {book} born?", [author.town], TWO_HOP, hops
            yield f"When was the author of {book} born?", _dates(author.born), TWO_HOP, hops
        for firm, founder in zip(self.firms, self.founders, strict=True):
            yield f"In which town was the founder of {firm} born?", [founder.town], TWO_HOP, [firm, founder.name]
        for person in self.people:
            river = self.rivers[self.towns.index(person.town)]
            question = f"Which river flows through the town where {person.name} was born?"
            yield question, [river, f"{river} river", f"river {river}"], TWO_HOP, [person.name, person.town]

    def _yes_no(self, rng: random.Random) -> Iterator[tuple[str, list[str], str, list[str]]]:
        first, second = rng.sample([0, 1], 2)
        answer = "yes" if self.founded[first] < self.founded[second] else "no"
        question = f"Was {self.firms[first]} founded before {self.firms[second]}?"
        yield question, [answer], TWO_HOP, [self.firms[first], self.firms[second]]


def _date(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(1801, 1950), rng.randint(1, 12), rng.randint(1, 28)


def _day(date: tuple[int, int, int]) -> str:
    year, month, day = date
    return f"{day} {_MONTHS[month - 1]} {year}"


def _dates(date: tuple[int, int, int]) -> list[str]:
    year, month, day = date
    name = _MONTHS[month - 1]
    return [_day(date), f"{name} {day}, {year}", f"{name} {day} {year}", f"{year}-{month:02d}-{day:02d}"]
