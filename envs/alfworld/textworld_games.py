"""ALFWorld games on TextWorld's engine: as the package plays them, and the same at a fraction of the cost.

`CachedGame` keeps TextWorld's planner library, state and grammar, and replaces what is slow around them: the
translation comes from a cache, texts from `textworld_texts`, and one copy of the library (34 MB) serves one game after
another. `PipGame` is the package's engine as it is, for checks.

Neither may run in threads: the parser is shared, and a translation swaps `sys.stdout`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fast_downward
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from alfworld.agents.utils.misc import Demangler
from textworld.envs.pddl import PddlEnv
from textworld.envs.pddl.logic import Atom, GameLogic, PddlState
from textworld.envs.pddl.textgen import ProductionRule, TerminalSymbol
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Type, Variable

from envs.alfworld.games import TASK_MARKER
from envs.alfworld.native import NOTHING_HAPPENS, WIN_REWARD
from envs.alfworld.problem import CorruptGame
from envs.alfworld.textworld_texts import Texts
from envs.alfworld.translation import Translation, translated
from envs.base import Obs

# The rule with the task, where its sentence has none of the signs that mean something to the grammar's parser.
_TASK_RULE = re.compile(rf"""("task"\s*:\s*\[\s*{{\s*"rhs"\s*:\s*")({TASK_MARKER}[A-Za-z0-9 ,.'-]*)("\s*}}\s*\])""")
_ANY_TASK = "Your task is to: any."

_idle_libraries: list[Any] = []  # copies of the planner's library that no game uses now


class PipGame:
    """The package's own engine: 1.5 s to load a game, 40 ms a step."""

    def __init__(self, data: Mapping[str, Any], where: str | Path, goal: str, walkthrough: list[str] | None):
        self.goal = goal
        self.walkthrough = walkthrough
        self._game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        with _named_if_corrupt(where):
            self._game.load(data)

    def reset(self) -> Obs:
        self._won = False
        self._last = self._observe(self._game.reset())
        return self._last

    def step(self, command: str) -> Obs:
        if not isinstance(command, str):
            self._last = self._last._replace(text=NOTHING_HAPPENS, reward=0.0)
            return self._last
        state, _, _ = self._game.step(command)
        self._last = self._observe(state)
        return self._last

    def _observe(self, state: Any) -> Obs:
        won = bool(state["won"])
        reward = WIN_REWARD if won and not self._won else 0.0
        self._won = won
        return Obs(state.feedback, tuple(state["admissible_commands"]), won, won, reward)


class CachedGame:
    """The same game from a cached translation."""

    def __init__(self, data: Mapping[str, Any], where: str | Path, goal: str, walkthrough: list[str] | None):
        self.goal = goal
        self.walkthrough = walkthrough
        with _named_if_corrupt(where):
            translation = translated(data["pddl_domain"], data["pddl_problem"])
            logic, rules = _grammar(data["pddl_domain"], data["grammar"])
            library = _borrow_library()
            weakref.finalize(self, _idle_libraries.append, library)
            self._state = _State(library, logic, translation)
            self._things = _named_things(self._state)
            self._texts = Texts(rules, self._state, self._things)
        self._changing = translation.changing
        self._commands_of: dict[str, str] = {}  # operator -> its command, where nothing can change that
        self._moved = False

    def reset(self) -> Obs:
        if self._moved:
            self._state.restart()
        self._moved = self._won = False
        return self._observe(self._texts.derive("#intro#", {})[0])

    def step(self, command: str) -> Obs:
        operator = self._operators.get(command.strip()) if isinstance(command, str) else None
        if operator is None:
            return self._last._replace(text=NOTHING_HAPPENS, reward=0.0)
        self._moved = True
        self._state.apply(operator)
        text, _ = self._texts.derive(self._state.rule(operator).feedback_rule, self._state.mapping(operator))
        return self._observe(text)

    def _observe(self, text: str) -> Obs:
        self._operators: dict[str, Any] = {}  # command -> operator; of operators with equal commands the first
        for operator in self._state.operators():
            self._operators.setdefault(self._command(operator), operator)
        before, self._won = self._won, bool(self._state.check_goal())
        reward = WIN_REWARD if self._won and not before else 0.0
        self._last = Obs(text, tuple(sorted(self._operators)), self._won, self._won, reward)
        return self._last

    def _command(self, operator: Any) -> str:
        name = operator.name
        if name in self._commands_of:
            return self._commands_of[name]
        mapping = self._state.mapping(operator)
        text, asked = self._texts.derive(self._state.rule(operator).template, mapping)
        text = text.format(**{key.name: self._things[value.name].name for key, value in mapping.items()})
        if not any(predicate.removeprefix("not_") in self._changing for predicate in asked):
            self._commands_of[name] = text
        return text


class _State(PddlState):
    """TextWorld's state of a PDDL game, started from a translation. Operators are the planner's."""

    def __init__(self, library: Any, logic: GameLogic, translation: Translation):
        self.downward_lib, self._logic, self.name2type = library, logic, translation.objects
        self._facts, self._vars_by_name = defaultdict(set), {}
        self._vars_by_type, self._var_counts = defaultdict(set), Counter()
        self._placeholders = {
            action: [Placeholder(name, kind) for name, kind in parameters]
            for action, parameters in translation.actions.items()
        }
        for name, supertypes in translation.types:
            with contextlib.suppress(ValueError):  # an earlier game has added it
                logic.types.add(Type(name, supertypes))
        self._sas = translation.sas.encode()
        library.load_sas(self._sas)
        self.add_facts(
            Proposition(predicate, [Variable(name, self.name2type[name]) for name in names])
            for predicate, names in translation.facts
        )
        atoms = (Atom * library.get_state_size())()
        library.get_state(atoms)
        self.add_facts(a.get_fact(self.name2type) for a in atoms if not a.name.startswith("NegatedAtom"))
        self._start = self._copied()

    def _copied(self) -> tuple[dict, dict, dict, Counter]:
        copied = [
            defaultdict(set, {key: set(members) for key, members in sets.items()})
            for sets in (self._facts, self._vars_by_type)
        ]
        return copied[0], dict(self._vars_by_name), copied[1], Counter(self._var_counts)

    def restart(self) -> None:
        self.downward_lib.load_sas(self._sas)
        self._facts, self._vars_by_name, self._vars_by_type, self._var_counts = self._start
        self._start = self._copied()

    def operators(self) -> list[Any]:
        """What can be done now: of operators that differ in nothing but their number the first."""
        found = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(found)
        self._operators = {operator.id: operator for operator in found}
        first: dict[str, Any] = {}
        for operator in found:
            first.setdefault(operator.name, operator)
        return list(first.values())

    def rule(self, operator: Any) -> Any:
        """The grammar's action: `template` of its command, `feedback_rule` of its answer."""
        return self._logic.actions[operator.name.split(" ", 1)[0]]

    def mapping(self, operator: Any) -> dict[Placeholder, Variable]:
        action, *names = operator.name.split()
        # An action has more parameters than its operators show: those of quantifiers that were moved out.
        return {key: Variable(name, key.type) for key, name in zip(self._placeholders[action], names, strict=False)}


@contextlib.contextmanager
def _named_if_corrupt(where: str | Path):
    try:
        yield
    except OSError:  # the machine's fault, not the file's
        raise
    except Exception as error:  # KeyError, IndexError, ParseError, FailedParse...: the libraries promise nothing
        raise CorruptGame(where, f"TextWorld cannot load it ({type(error).__name__}: {error})") from error


def _borrow_library() -> Any:
    """A copy of the planner's library that no game uses. None is ever unloaded, and a new one costs 5 MB for good."""
    if _idle_libraries:
        return _idle_libraries.pop()
    try:
        return fast_downward.load_lib()
    except OSError as error:
        raise OSError(
            f"the planner's library cannot be loaded from a copy in the temporary directory ({error}); set TMPDIR to a "
            "directory with 40 MB free in which programs may run"
        ) from error


def _grammar(domain: str, grammar: str) -> tuple[GameLogic, dict[str, list[Any]]]:
    """(TextWorld's logic, productions by name). The text is parsed once for all the tasks it comes with."""
    tasks = _TASK_RULE.findall(grammar)
    if len(tasks) != 1:
        logic = _parsed(domain, grammar)
        return logic, logic.grammar._rules
    logic = _parsed(domain, _TASK_RULE.sub(rf"\g<1>{_ANY_TASK}\g<3>", grammar))
    return logic, {**logic.grammar._rules, "task": [ProductionRule("task", [TerminalSymbol(tasks[0][1])])]}


@functools.lru_cache(maxsize=8)
def _parsed(domain: str, grammar: str) -> GameLogic:
    return GameLogic(domain=domain, grammar=grammar)


def _named_things(state: PddlState) -> dict[str, EntityInfo]:
    """Everything that the facts speak of, under the names that players see."""
    things = {v.name: EntityInfo(v.name, v.type) for fact in state.facts for v in fact.arguments}
    names = Demangler(game_infos=things)
    for thing in things.values():
        thing.name = names.demangle_alfred_name(thing.id)
        thing.definite, thing.indefinite = "the", "a"
    return things
