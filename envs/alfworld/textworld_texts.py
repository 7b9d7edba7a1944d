"""Texts of TextWorld's PDDL games from their grammar, without what makes TextWorld slow and unsafe at it.

TextWorld parses the same templates and queries again at every use (60 % of a step) and copies contexts deeply (30 %).
Here each text is parsed once a process, by TextWorld's own parser, and nothing is copied. TextWorld also hands the
expressions of a game file to `eval`; here they may only name, join and choose between fields of things.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

from textworld.envs.pddl import textgen as tw
from textworld.generator.game import EntityInfo
from textworld.logic import Rule

FIELDS = frozenset(EntityInfo.__slots__)


class GrammarError(ValueError):
    """The grammar of a game asks for something that is not supported; the message quotes it."""


@functools.lru_cache(maxsize=4096)
def symbols(text: str) -> tuple[Any, ...]:
    """A template such as "open {r}" as TextWorld's symbols. They are shared: nobody may change them."""
    return tuple(tw._parse_and_convert(text, rule_name="symbols"))


@functools.lru_cache(maxsize=4096)
def query(text: str) -> Rule:
    """A condition such as "openable(r:receptacle) & opened(r:receptacle)"."""
    return Rule.parse_conjunctive_query(text)


@functools.lru_cache(maxsize=4096)
def expression(text: str) -> Callable[[Mapping[str, EntityInfo]], Any]:
    """`o.indefinite + ' ' + o.name` as a function of the variables. Raises GrammarError for anything cleverer."""
    try:
        return _compiled(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, GrammarError):
        raise GrammarError(f"the grammar's expression {text!r} is more than names, fields, texts, + and or") from None


def _compiled(node: ast.expr) -> Callable[[Mapping[str, EntityInfo]], Any]:
    match node:
        case ast.Constant(value=str(text)):
            return lambda _: text
        case ast.Name(id=name):
            return lambda variables: variables[name]
        case ast.Attribute(value=ast.Name(id=name), attr=field) if field in FIELDS:
            return lambda variables: getattr(variables[name], field)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _compiled(left), _compiled(right)
            return lambda variables: first(variables) + second(variables)
        case ast.BoolOp(op=ast.Or(), values=values):
            choices = [_compiled(value) for value in values]
            return lambda variables: functools.reduce(lambda a, b: a or b, (choice(variables) for choice in choices))
    raise GrammarError


class Texts:
    """The texts of one game. `rules`: productions by name, as TextWorld's grammar keeps them; `state`: its facts."""

    def __init__(self, rules: Mapping[str, list[Any]], state: Any, things: Mapping[str, EntityInfo]):
        self._rules, self._state, self._things = rules, state, things
        self._asked: set[str] = set()

    def derive(self, template: str, mapping: Mapping[Any, Any]) -> tuple[str, frozenset[str]]:
        """(text, predicates it depended on). mapping: placeholders -> TextWorld's variables."""
        self._asked = set()
        variables = {placeholder.name: self._things[value.name] for placeholder, value in mapping.items()}
        text = self._join(symbols(template), variables, mapping)
        return text, frozenset(self._asked)

    def _join(self, parts, variables, mapping) -> str:
        return "".join(self._one(part, variables, mapping) for part in parts)

    def _one(self, symbol, variables, mapping) -> str:
        match symbol:
            case tw.TerminalSymbol():
                return str(symbol)
            case tw.NonterminalSymbol():
                return self._rule(str(symbol), variables, mapping)
            case tw.EvalSymbol():
                return str(expression(symbol.expression)(variables))
            case tw.ConditionalSymbol():
                return "".join(self._each(symbol, variables, mapping))
            case tw.ListSymbol():
                return self._list(self._each(symbol.symbol, variables, mapping), variables, mapping)
        raise GrammarError(f"the grammar has a symbol of the unknown kind {type(symbol).__name__}")

    def _rule(self, name: str, variables, mapping) -> str:
        for rule in self._rules.get(name, ()):
            if not rule.condition or next(self._matches(rule.condition, mapping), None) is not None:
                return self._join(rule.rhs, variables, mapping)
        raise GrammarError(f"the grammar has no rule #{name}# that applies")

    def _each(self, symbol, variables, mapping) -> list[str]:
        """The texts of `{expression | condition}`, one for each way to meet the condition."""
        if not symbol.given:
            return [self._one(symbol.expression, variables, mapping)]
        texts = []
        for found in self._matches(symbol.given, mapping):
            inner = dict(variables)
            inner.update((placeholder.name, self._things[value.name]) for placeholder, value in found.items())
            texts.append(self._one(symbol.expression, inner, dict(found)))
        return texts

    def _matches(self, condition: str, mapping):
        rule = query(condition)
        self._asked.update(predicate.name for predicate in rule.preconditions)
        return iter(self._state.all_assignments(rule, mapping))

    def _list(self, items: list[str], variables, mapping) -> str:
        if not items:
            return self._rule("list_empty", variables, mapping)
        if len(items) == 1:
            return items[0]
        comma = self._rule("list_separator", variables, mapping)
        return comma.join(items[:-1]) + self._rule("list_last_separator", variables, mapping) + items[-1]
