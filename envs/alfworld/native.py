"""ALFWorld's text game in plain Python: no TextWorld, no planner, a step takes a few hundredths of a millisecond.

The PDDL domain of ALFWorld (release 0.4) is one fixed text, so its actions are written here as methods. The observation
texts, the admissible commands and the win flag are those of TextWorld's engine, its peculiarities included;
`tests/envs/alfworld/test_engine.py` plays both engines side by side.

Vocabulary: a *receptacle* is furniture (a fridge, a drawer), an *object* can be carried; both are known by PDDL ids
such as `apple_bar_03` and shown under names such as `apple 1`.
"""

from __future__ import annotations

from collections import defaultdict

from envs.alfworld.problem import ABILITIES, Problem
from envs.base import Obs

WIN_REWARD = 10.0
BANNER = "-= Welcome to TextWorld, ALFRED! =-"
NOTHING_HAPPENS = "Nothing happens."
HELP_TEXT = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def _enumerate_names(names: list[str]) -> str:
    if not names:
        return "nothing"
    if len(names) == 1:
        return "a " + names[0]
    return ", ".join("a " + name for name in names[:-1]) + ", and a " + names[-1]


class NativeGame:
    """One game over a Problem. `task_line` is the last line of the first observation, `goal` the sentence in it."""

    def __init__(self, problem: Problem, goal: str, task_line: str, walkthrough: list[str] | None = None):
        self.goal = goal
        self.walkthrough = walkthrough
        self._task_line = task_line
        facts, self._goal, self._names = problem
        self._facts = facts
        self._place = dict(sorted(facts["receptacleatlocation"]))  # receptacle -> location
        self._at_place: dict[str, list[str]] = defaultdict(list)  # location -> its receptacles, in id order
        for receptacle, location in self._place.items():
            self._at_place[location].append(receptacle)
        self._kinds: dict[str, set[str]] = defaultdict(set)  # object or receptacle -> its types
        for thing, kind in facts["receptacletype"] | facts["objecttype"]:
            self._kinds[thing].add(kind)
        self._accepts: dict[str, set[str]] = defaultdict(set)  # receptacle -> object types that fit
        for receptacle in self._place:
            self._accepts[receptacle] = {o for r, o in facts["cancontain"] if r in self._kinds[receptacle]}
        able = {name: {row[0] for row in facts[name]} for name in ("openable", "pickupable", "toggleable", "sliceable")}
        self._openable, self._pickupable = able["openable"], able["pickupable"]
        self._toggleable, self._sliceable = able["toggleable"], able["sliceable"]
        self._able = {state: {row[0] for row in facts[name]} for state, name in ABILITIES.items()}
        self._goal_places = [r for r in self._kinds if self._goal.where in self._kinds[r]]
        self._fixed_commands: dict[str, dict[str, tuple]] = {}  # location -> commands that only depend on it

    def reset(self) -> Obs:
        """Start over."""
        facts = self._facts
        self._location = next(location for _, location in facts["atlocation"])
        self._held = next((thing for _, thing in facts["holds"]), None)
        self._opened = {row[0] for row in facts["opened"]}
        self._contents: dict[str, set[str]] = {receptacle: set() for receptacle in self._place}
        for thing, receptacle in facts["inreceptacle"]:
            self._contents.setdefault(receptacle, set()).add(thing)
        self._object_at: dict[str, set[str]] = defaultdict(set)  # location -> objects there
        for thing, location in facts["objectatlocation"]:
            self._object_at[location].add(thing)
        self._states = {
            s: {row[0] for row in facts[s]} for s in ("isclean", "ishot", "iscool", "issliced", "istoggled")
        }
        # TextWorld only knows that an object is *not* in a receptacle once a `take` has said so; `look` reads that fact
        self._taken: set[tuple[str, str]] = set()
        self._won = False
        room = _enumerate_names([self._names[receptacle] for receptacle in self._place])
        intro = f"You are in the middle of a room. Looking quickly around you, you see {room}."
        return self._observe(f"{BANNER}\n\n{self._look() if self._here() else intro}\n\n{self._task_line}")

    def step(self, command: str) -> Obs:
        """Carry out one command; anything that is not admissible leaves the state as it is ("Nothing happens.")."""
        action = self._commands.get(command.strip()) if isinstance(command, str) else None
        if action is None:
            return self._observe(NOTHING_HAPPENS, moved=False)
        method, *args = action
        return self._observe(method(*args))

    def _observe(self, text: str, moved: bool = True) -> Obs:
        if moved:
            self._commands = self._list_commands()
            self._admissible = tuple(sorted(self._commands))
        before, self._won = self._won, self._goal_holds()
        reward = WIN_REWARD if self._won and not before else 0.0
        return Obs(text, self._admissible, self._won, self._won, reward)

    def _here(self) -> list[str]:
        return self._at_place.get(self._location, [])

    # -- which commands are possible ----------------------------------------------------------------------------------

    def _list_commands(self) -> dict[str, tuple]:
        """Command text -> (method, *arguments)."""
        name, here, held = self._names, self._here(), self._held
        commands = dict(self._commands_fixed_at(self._location))
        for receptacle in here:
            shut = False
            if receptacle in self._openable:
                shut = receptacle not in self._opened
                if shut:
                    commands[f"open {name[receptacle]}"] = (self._open, receptacle)
                else:
                    commands[f"close {name[receptacle]}"] = (self._close, receptacle)
            for thing in self._contents[receptacle]:
                if held is None and not shut and thing in self._pickupable:
                    commands[f"take {name[thing]} from {name[receptacle]}"] = (self._take, thing, receptacle)
                if thing in self._toggleable:  # a closed door does not hide a switch
                    commands[f"use {name[thing]}"] = (self._use, thing)
            if held is not None:
                self._add_held_commands(commands, held, receptacle, shut)
        if held is not None:
            commands[f"examine {name[held]}"] = (self._examine_object, held)  # offered for the held object only
            if not self._kinds[held].isdisjoint(("knifetype", "butterknifetype")):
                for thing in self._object_at[self._location] & self._sliceable:
                    commands[f"slice {name[thing]} with {name[held]}"] = (self._slice, thing, held)
        return commands

    def _commands_fixed_at(self, location: str) -> dict[str, tuple]:
        if location not in self._fixed_commands:
            commands = {"look": (self._look,), "inventory": (self._inventory,), "help": (self._help,)}
            for receptacle, place in self._place.items():
                if place == location:
                    commands[f"examine {self._names[receptacle]}"] = (self._describe, receptacle)
                else:
                    commands[f"go to {self._names[receptacle]}"] = (self._go, receptacle)
            self._fixed_commands[location] = commands
        return self._fixed_commands[location]

    def _add_held_commands(self, commands: dict[str, tuple], held: str, receptacle: str, shut: bool) -> None:
        thing, place, kinds = self._names[held], self._names[receptacle], self._kinds[receptacle]
        if not shut and not self._accepts[receptacle].isdisjoint(self._kinds[held]):
            commands[f"move {thing} to {place}"] = (self._move, held, receptacle)
        # appliances work whether open or not
        if held in self._able["isclean"] and ("sinkbasintype" in kinds or "sinktype" in kinds):
            commands[f"clean {thing} with {place}"] = (self._clean, held, receptacle)
        if held in self._able["ishot"] and "microwavetype" in kinds:
            commands[f"heat {thing} with {place}"] = (self._heat, held, receptacle)
        if held in self._able["iscool"] and "fridgetype" in kinds:
            commands[f"cool {thing} with {place}"] = (self._cool, held, receptacle)

    # -- what the commands do and say ---------------------------------------------------------------------------------

    def _go(self, receptacle: str) -> str:
        self._location = self._place[receptacle]
        return f"You arrive at {self._names[receptacle]}. {self._describe(receptacle)}"

    def _open(self, receptacle: str) -> str:
        self._opened.add(receptacle)
        return f"You open the {self._names[receptacle]}. {self._describe(receptacle)}"

    def _close(self, receptacle: str) -> str:
        self._opened.discard(receptacle)
        return f"You close the {self._names[receptacle]}."

    def _take(self, thing: str, receptacle: str) -> str:
        self._contents[receptacle].discard(thing)
        self._object_at[self._location].discard(thing)
        self._taken.add((thing, receptacle))
        self._held = thing
        return f"You pick up the {self._names[thing]} from the {self._names[receptacle]}."

    def _move(self, thing: str, receptacle: str) -> str:
        self._contents[receptacle].add(thing)
        self._object_at[self._location].add(thing)
        self._taken.discard((thing, receptacle))
        self._held = None
        return f"You move the {self._names[thing]} to the {self._names[receptacle]}."

    def _clean(self, thing: str, receptacle: str) -> str:
        self._states["isclean"].add(thing)
        return f"You clean the {self._names[thing]} using the {self._names[receptacle]}."

    def _heat(self, thing: str, receptacle: str) -> str:
        self._states["ishot"].add(thing)
        self._states["iscool"].discard(thing)
        return f"You heat the {self._names[thing]} using the {self._names[receptacle]}."

    def _cool(self, thing: str, receptacle: str) -> str:
        self._states["iscool"].add(thing)
        self._states["ishot"].discard(thing)
        return f"You cool the {self._names[thing]} using the {self._names[receptacle]}."

    def _use(self, thing: str) -> str:
        self._states["istoggled"].add(thing)  # never goes off again
        return f"You turn on the {self._names[thing]}."

    def _slice(self, thing: str, knife: str) -> str:
        self._states["issliced"].add(thing)
        return f"You sliced the {self._names[thing]} with the {self._names[knife]}."

    def _help(self) -> str:
        return HELP_TEXT

    def _inventory(self) -> str:
        return f"You are carrying: a {self._names[self._held]}." if self._held else "You are not carrying anything."

    def _look(self) -> str:
        here = self._here()
        if not here:  # the room is described at reset only: away from furniture, a later `look` lists nothing
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = [self._names[receptacle] for receptacle in here]
        facing_text = facing[0] if len(facing) == 1 else ", ".join(facing[:-1]) + ", and " + facing[-1]
        loose = [  # lists what a `take` once removed from a receptacle here and that lies here again
            self._names[thing]
            for thing in sorted(self._object_at[self._location])
            for receptacle in here
            if (thing, receptacle) in self._taken
        ]
        return f"You are facing the {facing_text}. Next to it, you see {_enumerate_names(loose)}."

    def _describe(self, receptacle: str) -> str:
        name = self._names[receptacle]
        if receptacle in self._openable and receptacle not in self._opened:
            return f"The {name} is closed."
        inside = _enumerate_names([self._names[thing] for thing in sorted(self._contents[receptacle])])
        if receptacle in self._openable:
            return f"The {name} is open. In it, you see {inside}."
        return f"On the {name}, you see {inside}."

    def _examine_object(self, thing: str) -> str:
        name = self._names[thing]
        if (thing,) in self._facts["isreceptacleobject"]:
            inside = [self._names[i] for i, outer in sorted(self._facts["inreceptacleobject"]) if outer == thing]
            return f"This is a normal {name}. In it, you see {_enumerate_names(inside)}."
        clean, hot, cool, cut = (thing in self._states[s] for s in ("isclean", "ishot", "iscool", "issliced"))
        sliced = "sliced " if cut else ""
        if clean and (hot or cool):
            return f"This is a {'hot' if hot else 'cool'} and clean {sliced}{name}."
        if clean and cut:
            return f"This is a clean sliced {name}."
        if hot or (cool and cut):
            return f"This is a {'hot' if hot else 'cool'} {sliced}{name}."
        if clean:
            return f"This is a clean {name}."
        if cool:
            return f"This is a cold {name}."  # "cold" here, "cool" everywhere else
        if thing in self._toggleable and thing in self._states["istoggled"]:
            return f"This {name} is on."
        if thing in self._sliceable and cut:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # -- the goal -----------------------------------------------------------------------------------------------------

    def _goal_holds(self) -> bool:
        kind, what, where = self._goal
        if kind == "light":
            if self._held is None or what not in self._kinds[self._held]:
                return False
            lit = self._states["istoggled"] & self._toggleable
            return any(where in self._kinds[t] for r in self._here() for t in self._contents[r] & lit)
        fit = self._states[kind] & self._able[kind] if kind in ABILITIES else None
        needed = 2 if kind == "two" else 1
        for receptacle in self._goal_places:
            contents = self._contents.get(receptacle, ())
            if sum(what in self._kinds[thing] and (fit is None or thing in fit) for thing in contents) >= needed:
                return True
        return False
