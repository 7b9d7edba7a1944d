"""Read the PDDL problem of an ALFWorld game and check it.

The PDDL domain of ALFWorld (release 0.4) is one fixed text, so a problem can be checked against tables: every fact must
be one of the domain's predicates with declared names of the right types, and the goal one of ALFWorld's six.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

# Predicates of the domain and the types of their arguments (PDDL names are case-insensitive: all lower case here).
_PREDICATES = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "inreceptacle": ("object", "receptacle"),
    "isreceptacleobject": ("object",),
    "inreceptacleobject": ("object", "object"),
    "isreceptacleobjectfull": ("object",),
    "wasinreceptacle": ("object", "receptacle"),
    "checked": ("receptacle",),
    "examined": ("location",),
    "receptacletype": ("receptacle", "rtype"),
    "cancontain": ("rtype", "otype"),
    "objecttype": ("object", "otype"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    "holdsanyreceptacleobject": ("agent",),
    "full": ("receptacle",),
    "isclean": ("object",),
    "cleanable": ("object",),
    "ishot": ("object",),
    "heatable": ("object",),
    "iscool": ("object",),
    "coolable": ("object",),
    "pickupable": ("object",),
    "moveable": ("object",),
    "toggleable": ("object",),
    "ison": ("object",),
    "istoggled": ("object",),
    "sliceable": ("object",),
    "issliced": ("object",),
}

# The six goals of ALFWorld, each as the set of its literals with the type constants left out.
_PUT_GOAL = frozenset({"inreceptacle ?o ?r", "objecttype ?o", "receptacletype ?r"})
_TWO_GOAL = frozenset(
    {"inreceptacle ?o1 ?r", "inreceptacle ?o2 ?r", "objecttype ?o1", "objecttype ?o2", "receptacletype ?r", "= ?o1 ?o2"}
)
_LIGHT_GOAL = frozenset(
    {"objecttype ?o", "holds ?a ?o", "atlocation ?a ?l", "objecttype ?ot", "toggleable ?ot", "istoggled ?ot"}
    | {"inreceptacle ?ot ?r", "receptacleatlocation ?r ?l"}
)
_GOALS = {
    _PUT_GOAL: "put",
    _PUT_GOAL | {"cleanable ?o", "isclean ?o"}: "isclean",
    _PUT_GOAL | {"heatable ?o", "ishot ?o"}: "ishot",
    _PUT_GOAL | {"coolable ?o", "iscool ?o"}: "iscool",
    _TWO_GOAL: "two",
    _LIGHT_GOAL: "light",
}
ABILITIES = {"isclean": "cleanable", "ishot": "heatable", "iscool": "coolable"}

_LITERAL = re.compile(r"\(([^()]+)\)")
_COMMENT = re.compile(r";[^\n]*")


class CorruptGame(ValueError):
    """A game that cannot be played. `path` names the file (or the generated game), `reason` what is wrong in it."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    def __reduce__(self):  # the default would call the constructor with the joined message when crossing processes
        return CorruptGame, (self.path, self.reason)


class Goal(NamedTuple):
    """What wins. `kind`: put, two, light, isclean, ishot or iscool; `where`: a type of receptacle (light: of lamp)."""

    kind: str
    what: str
    where: str


class Problem(NamedTuple):
    """A parsed PDDL problem: initial facts by predicate (argument tuples) and the goal."""

    facts: dict[str, set[tuple[str, ...]]]
    goal: Goal
    names: dict[str, str]  # id -> name shown to the player


def parse_problem(text: str, where: str | Path = "problem") -> Problem:
    """Read a PDDL problem of the ALFWorld domain; ill-formed: CorruptGame, naming the origin `where`."""
    objects, init, goal_text = sections(text, where)
    types = _declared_types(objects, where)
    facts = _initial_facts(init, types, where)
    goal = _parse_goal(goal_text, where)
    if len(facts["atlocation"]) != 1:
        raise CorruptGame(where, f"expected one (atLocation agent place) fact, found {len(facts['atlocation'])}")
    if not any(otype == goal.what for _, otype in facts["objecttype"]):
        raise CorruptGame(where, f"the goal asks for an object of type {goal.what!r}, but the game has none")
    places = facts["objecttype"] if goal.kind == "light" else facts["receptacletype"]
    if not any(place == goal.where for _, place in places):
        raise CorruptGame(where, f"the goal names the type {goal.where!r}, but nothing in the game is of that type")
    mentioned = {arg for rows in facts.values() for row in rows for arg in row}
    return Problem(facts, goal, display_names(mentioned))


def sections(text: str, where: str | Path = "problem") -> tuple[str, str, str]:
    """The lower-case texts of (:objects, (:init and (:goal. A problem that is cut off: CorruptGame."""
    text = text.lower()
    if ";" in text:
        text = _COMMENT.sub("", text)
    objects_at, init_at, goal_at = text.find("(:objects"), text.find("(:init"), text.find("(:goal")
    if not 0 <= objects_at < init_at < goal_at:
        raise CorruptGame(where, "the PDDL problem must hold (:objects, (:init and (:goal, in this order")
    if text.count("(") > text.count(")"):  # the official files close one parenthesis too many, hence no equality
        raise CorruptGame(where, "the PDDL problem has more '(' than ')': it is cut off or damaged")
    return text[objects_at + len("(:objects") : init_at], text[init_at + len("(:init") : goal_at], text[goal_at:]


def _declared_types(section: str, where: str | Path) -> dict[str, str]:
    """`a b - receptacle c - object` as {"a": "receptacle", ...}."""
    types: dict[str, str] = {}
    pending: list[str] = []
    tokens = iter(section.replace(")", " ").split())
    for token in tokens:
        if token != "-":
            pending.append(token)
            continue
        kind = next(tokens, None)
        if kind is None or not pending:
            raise CorruptGame(where, "(:objects: every '-' needs names before it and a type after it")
        types.update(dict.fromkeys(pending, kind))
        pending = []
    if pending:
        raise CorruptGame(where, f"(:objects: {pending[0]!r} has no type")
    return types


def _initial_facts(section: str, types: dict[str, str], where: str | Path) -> dict[str, set[tuple[str, ...]]]:
    facts: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for literal in _LITERAL.findall(section):
        predicate, *args = literal.split() or [""]
        expected = _PREDICATES.get(predicate)
        if expected is None:
            raise CorruptGame(where, f"(:init: unknown predicate {predicate!r} in ({literal})")
        if tuple(map(types.get, args)) != expected:
            wanted = " ".join((predicate, *expected))
            raise CorruptGame(where, f"(:init: ({literal}) should read ({wanted}) with names declared in (:objects")
        facts[predicate].add(tuple(args))
    if _LITERAL.sub("", section).strip(" \t\r\n()"):
        raise CorruptGame(where, "(:init: text outside of parentheses")
    return facts


def _parse_goal(section: str, where: str | Path) -> Goal:
    shape: set[str] = set()
    constants: dict[str, set[str]] = defaultdict(set)  # variable -> types asked of it
    for literal in _LITERAL.findall(section):
        predicate, *args = literal.split() or [""]
        if predicate.startswith("?") or predicate in (":metric", "total-cost"):
            continue  # a quantifier's variable list, or the cost line after the goal
        if predicate in ("objecttype", "receptacletype") and len(args) == 2:
            constants[args[0]].add(args[1])
            args = args[:1]
        shape.add(" ".join([predicate, *args]))
    kind = _GOALS.get(frozenset(shape))
    if kind is None:
        raise CorruptGame(where, f"the goal is none of ALFWorld's six: {' & '.join(sorted(shape)) or 'empty'}")
    object_types = constants["?o1"] | constants["?o2"] if kind == "two" else constants["?o"]
    place_types = constants["?ot"] if kind == "light" else constants["?r"]
    if len(object_types) != 1 or len(place_types) != 1:
        raise CorruptGame(where, "the goal must name one object type and one receptacle (or lamp) type")
    return Goal(kind, object_types.pop(), place_types.pop())


def display_names(ids: set[str]) -> dict[str, str]:
    """Names shown to the player: ids in sorted order, numbers of a class handed out from the highest down.

    {"cup_bar_1", "cup_bar_7"} gives cup_bar_1 -> "cup 2" and cup_bar_7 -> "cup 1". An id without `_bar_` keeps its text
    and a trailing blank, as in TextWorld's ALFWorld wrapper.
    """
    ordered = sorted(ids)
    left = Counter(_display_class(i) for i in ordered if "_bar_" in i)
    names = {}
    for identifier in ordered:
        if "_bar_" not in identifier:
            names[identifier] = identifier + " "
            continue
        kind = _display_class(identifier)
        names[identifier] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def _display_class(identifier: str) -> str:
    head = identifier.split("_bar_", 1)[0]
    return head + "basin" if "basin" in identifier else head  # sink_bar_3_bar_sinkbasin is a "sinkbasin"
