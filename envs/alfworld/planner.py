"""A rule-based ALFWorld player and hindsight annotator: the offline stand-ins for an expert and for a strong
language model.

The player sees only what a policy sees (observations and admissible commands) and searches in random order; it can
be told where the
object is or which places to avoid, and it can be made to lack a workflow (`skip_process`). The annotator turns a
finished episode
into a hindsight skill: a workflow after a success, what to avoid or not to forget after a failure.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import NamedTuple

PROCESS = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heat", "microwave"),
    "pick_cool_then_place_in_recep": ("cool", "fridge"),
}
TWO, LIGHT = "pick_two_obj_and_place", "look_at_obj_in_light"

_TAKE = re.compile(r"take (\w+ \d+) from (\w+ \d+)")
_MOVE = re.compile(r"move (\w+ \d+) to (\w+ \d+)")
_ITEM = re.compile(r"\ba (\w+) \d+")


def kind(name: str) -> str:
    """'shelf 1' -> 'shelf'."""
    return name.split(" ")[0] if name else ""


@dataclass
class Planner:
    """One player for one episode. Call `act` with each observation; call `note` after each executed command.

    game: needs `family`, `object`, `receptacle` (class names in lower case).
    known: receptacle said to hold the object; avoid: receptacles said not to hold it.
    skip_process: forget the clean/heat/cool step (the workflow that a weak policy lacks).
    """

    game: dict
    rng: random.Random
    known: str | None = None
    avoid: frozenset[str] = frozenset()
    skip_process: bool = False
    searched: set[str] = field(default_factory=set)
    held: str | None = None
    processed: bool = False
    placed: int = 0
    here: str | None = None
    source: str | None = None
    lamp: str | None = None
    destination: str | None = None

    def __post_init__(self) -> None:
        self.source = self.known
        self.processed = self.skip_process or self.game["family"] not in PROCESS

    def note(self, command: str | None, observation: str) -> None:
        """Updates beliefs with what `command` (None at the start) led to."""
        text = observation.lower()
        if command and "nothing happens" not in text:
            self._note_command(command)
        if self.here and re.search(r"on the|in it|is open|you open", text) and "is closed" not in text:
            self.searched.add(self.here)
            for item in _ITEM.findall(text):
                if item == self.game["object"] and kind(self.here) != self.game["receptacle"]:
                    self.source = self.here
                if item == "desklamp":
                    self.lamp = self.here

    def _note_command(self, command: str) -> None:
        verb = command.split(" ")[0]
        if command.startswith("go to "):
            self.here = command[len("go to ") :]
        elif match := _TAKE.match(command):
            self.held = match.group(1)
        elif match := _MOVE.match(command):
            done = kind(match.group(1)) == self.game["object"] and kind(match.group(2)) == self.game["receptacle"]
            self.placed += done
            self.held = None
        elif verb == PROCESS.get(self.game["family"], ("",))[0]:
            self.processed = True

    def act(self, admissible: tuple[str, ...]) -> tuple[str, str]:
        """(thought, command). The thought never reveals what a hint told: it must read the same with and without
        one."""
        if self.held and kind(self.held) != self.game["object"]:
            return self._put_down(admissible)
        if not self.held:
            return self._search(admissible)
        if not self.processed:
            return self._process(admissible)
        if self.game["family"] == LIGHT:
            return self._light(admissible)
        return self._deliver(admissible)

    def _put_down(self, admissible):
        moves = _having(admissible, "move ")
        if moves:
            return f"put down {kind(self.held)} .", moves[0]
        return f"put down {kind(self.held)} .", self._pick(_having(admissible, "go to "))

    def _search(self, admissible):
        wanted, target = self.game["object"], self.game["receptacle"]
        takes = [c for c in _having(admissible, f"take {wanted} ") if self._not_placed(c.split(" from ")[1])]
        if takes:
            return f"i see {wanted} , take it .", self._pick(takes)
        if self.here and self.here not in self.searched and f"open {self.here}" in admissible:
            return f"open it to look for {wanted} .", f"open {self.here}"
        thought = f"search for second {wanted} ." if self.placed else f"search for {wanted} ."
        places = [c[len("go to ") :] for c in _having(admissible, "go to ")]
        if self.source in places:
            return thought, f"go to {self.source}"
        fresh = [p for p in places if p not in self.searched and self._not_placed(p)]
        candidates = [p for p in fresh if p not in self.avoid and kind(p) != target] or fresh or places
        return thought, f"go to {self._pick(candidates)}"

    def _process(self, admissible):
        verb, appliance = PROCESS[self.game["family"]]
        ready = _having(admissible, f"{verb} {self.held} ")
        if ready:
            return f"{verb} {self.game['object']} now .", ready[0]
        return f"{verb} {self.game['object']} with {appliance} .", self._go(admissible, appliance)

    def _light(self, admissible):
        ready = _having(admissible, "use desklamp")
        if ready:
            return "use desklamp now .", ready[0]
        if self.lamp and f"go to {self.lamp}" in admissible:
            return "go to desklamp .", f"go to {self.lamp}"
        if self.here and self.here not in self.searched and f"open {self.here}" in admissible:
            return "search for desklamp .", f"open {self.here}"
        places = [c[len("go to ") :] for c in _having(admissible, "go to ")]
        return "search for desklamp .", f"go to {self._pick([p for p in places if p not in self.searched] or places)}"

    def _deliver(self, admissible):
        wanted, target = self.game["object"], self.game["receptacle"]
        if self.here and kind(self.here) == target:
            moves = _having(admissible, "move ")
            if moves:
                return f"put {wanted} in {target} .", moves[0]
            if f"open {self.here}" in admissible:
                return f"open it to put {wanted} .", f"open {self.here}"
        return f"bring {wanted} to {target} .", self._go(admissible, target)

    def _go(self, admissible, target: str) -> str:
        places = [c for c in _having(admissible, "go to ") if kind(c[len("go to ") :]) == target]
        if self.game["family"] == TWO and self.placed:
            places = [c for c in places if c[len("go to ") :] == self.destination] or places
        choice = self._pick(places or list(_having(admissible, "go to ")) or list(admissible))
        if kind(choice[len("go to ") :]) == self.game["receptacle"]:
            self.destination = choice[len("go to ") :]
        return choice

    def _not_placed(self, place: str) -> bool:
        return not (self.game["family"] == TWO and kind(place) == self.game["receptacle"])

    def _pick(self, choices):
        return self.rng.choice(list(choices))


def _having(admissible, prefix: str) -> list[str]:
    return [command for command in admissible if command.startswith(prefix)]


def annotate(game: dict, steps: list[tuple[str, str]], won: bool) -> tuple[str, str]:
    """(summary, skill) for a finished episode, from nothing but that episode.

    steps: (executed command, resulting observation); commands that could not be parsed are empty strings.
    """
    wanted, target, family = game["object"], game["receptacle"], game["family"]
    seen = _where_seen(steps, wanted, target)
    taken = any(_TAKE.match(c) and kind(c[len("take ") :]) == wanted and "pick up" in o.lower() for c, o in steps)
    verb, appliance = PROCESS.get(family, (None, None))
    used = next(
        (
            c.partition(" with ")[2]
            for c, o in steps
            if verb and c.startswith(f"{verb} {wanted} ") and f"you {verb}" in o.lower()
        ),
        None,
    )
    remind = "" if won else "do not forget to "
    if seen:
        where = f"{wanted} is at {seen} ."
    else:
        been = [c[len("go to ") :] for c, o in steps if c.startswith("go to ") and "arrive" in o.lower()]
        places = [place for place in dict.fromkeys(been) if kind(place) != target][:3]
        where = f"search for {wanted} first ."
        if places:
            where = f"avoid {' , '.join(places)} . look for {wanted} elsewhere ."
    take = "take it ," if won or taken or not seen else "do not forget to take it ,"
    if family == LIGHT:
        lit = any(c.startswith("use desklamp") for c, _ in steps)
        workflow = f"{take} then use desklamp ." if won or lit else f"{take} do not forget to use desklamp ."
    else:
        process = f"{remind if taken and not used else ''}{verb} it with {used or appliance + ' 1'} , " if verb else ""
        workflow = f"{take} {process}then move it to {target} 1 ."
    if family == TWO:
        again = "repeat with" if won or not taken else "do not forget"
        workflow += f" {again} the second {wanted} ."
    return "success" if won else "failure", f"{where} {workflow}"


def _where_seen(steps, wanted: str, target: str) -> str | None:
    here = None
    for command, observation in steps:
        if command.startswith("go to ") and "arrive" in observation.lower():
            here = command[len("go to ") :]
        match = _TAKE.match(command)
        if match and kind(match.group(1)) == wanted and kind(match.group(2)) != target:
            return match.group(2)
        if here and kind(here) != target and wanted in _ITEM.findall(observation.lower()):
            return here
    return None


class Hint(NamedTuple):
    """What a skill tells a player of one game.

    known: the receptacle that holds the object; avoid: those that do not; workflow: whether the skill names what this
    game's family is about, the clean / heat / cool step, the lamp or the second object.
    """

    known: str | None = None
    avoid: frozenset[str] = frozenset()
    workflow: bool = False


def read_hint(skill: str, game: dict) -> Hint:
    """What a skill in the words of `annotate` tells a player of `game`. Places count only if they are said of the
    game's own object, a workflow only if it is that of its family: of a skill about something else nothing is left."""
    wanted = game["object"]
    known = re.search(rf"\b{wanted} is at (\w+ \d+)", skill)
    avoid = re.search(rf"\bavoid (.*?) \. look for {wanted} elsewhere", skill)
    named = {TWO: rf"second {wanted}\b", LIGHT: "use desklamp"}.get(game["family"])
    if game["family"] in PROCESS:
        verb, appliance = PROCESS[game["family"]]
        named = rf"\b{verb} it with {appliance}\b"
    return Hint(
        known.group(1) if known else None,
        frozenset(avoid.group(1).split(" , ")) if avoid else frozenset(),
        bool(named and re.search(named, skill)),
    )


def skill_parts(skill: str) -> tuple[str, str]:
    """(workflow, places): the sentences of a skill about what to do, which hold in any room, and those about where
    things are in this one, which nobody can learn. Either may be empty."""
    sentences = [sentence.strip() for sentence in re.split(r"(?<=\s\.)\s+", skill.strip()) if sentence.strip()]
    parts: dict[bool, list[str]] = {False: [], True: []}
    for sentence in sentences:
        about_places = re.search(r"\bis at \w+ \d+|^avoid \w|^look for .* elsewhere", sentence)
        parts[about_places is not None].append(sentence)
    return " ".join(parts[False]), " ".join(parts[True])
