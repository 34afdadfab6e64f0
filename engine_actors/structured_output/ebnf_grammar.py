"""A user's EBNF, checked and written anew: every rule can end, regular parts are automata, all text is valid UTF-8."""

from __future__ import annotations

from engine_actors.structured_output.ebnf_parser import (
    Choice,
    Node,
    Reference,
    Repetition,
    Sequence,
    Terminal,
    parse_ebnf,
)
from engine_actors.structured_output.ebnf_writer import GrammarWriter, count_text
from engine_actors.structured_output.regex import Alt, Regex, Repeat, Seq, alt, is_empty_set, repeat, seq
from engine_actors.structured_output.schema_nodes import find_finite
from scheduler.structured_output import StructuredOutputError

ROOT = "root"
_MAX_INLINED_NODES = 512
_MAX_INLINED_DEPTH = 64
"""Largest expression that a rule may grow to by taking in the rules it names."""


def user_grammar(text: str) -> str:
    """The same language as `text` (GBNF with a rule `root`) in EBNF of our own.

    Raises:
        StructuredOutputError: A syntax error, an undefined rule, or a rule that has no end.
    """
    rules = parse_ebnf(text)
    if ROOT not in rules:
        names = ", ".join(list(rules)[:5])
        raise StructuredOutputError(f"grammar: there is no rule {ROOT!r} to start from; rules are {names or 'none'}")
    reachable = _reachable(rules)
    _check_finite({name: rules[name] for name in reachable})
    return _Writer({name: rules[name] for name in reachable}).grammar()


def _references(node: Node) -> list[Reference]:
    found: list[Reference] = []
    todo = [node]
    for each in todo:
        match each:
            case Reference():
                found.append(each)
            case Sequence(parts) | Choice(parts):
                todo.extend(parts)
            case Repetition(item):
                todo.append(item)
    return found


def _reachable(rules: dict[str, Node]) -> list[str]:
    """The rules that `root` leads to."""
    order = [ROOT]
    seen = {ROOT}
    for name in order:
        for reference in _references(rules[name]):
            if reference.name not in rules:
                raise StructuredOutputError(f"grammar, line {reference.line}: rule {reference.name!r} is not defined")
            if reference.name not in seen:
                seen.add(reference.name)
                order.append(reference.name)
    return order


def _check_finite(rules: dict[str, Node]) -> None:
    finite = find_finite(rules, _is_finite)
    endless = [name for name in rules if name not in finite]
    if endless:
        raise StructuredOutputError(
            f"grammar: no finite text matches rule {endless[0]!r}; it has no alternative that ends"
        )


def _is_finite(node: Node, finite: set[str]) -> bool:
    match node:
        case Terminal(regex):
            return not is_empty_set(regex)
        case Reference(name):
            return name in finite
        case Sequence(items):
            return all(_is_finite(item, finite) for item in items)
        case Choice(options):
            return any(_is_finite(option, finite) for option in options)
        case Repetition(item, low, _):
            return low == 0 or _is_finite(item, finite)


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._finite = set(rules)
        self._writer = GrammarWriter()
        self._regular: dict[str, Regex | None] = {}
        self._rule_sizes: dict[str, int] = {}  # of the regular ones
        self._names: dict[str, str] = {}
        for name in reversed(list(rules)):
            self._find_regular(name)

    def grammar(self) -> str:
        todo: list[str] = []
        root = self._name(ROOT, todo)
        for name in todo:  # grows as rules are named
            self._writer.define_rule(self._names[name], self._expression(self._rules[name], todo))
        return self._writer.grammar(root)

    # Regular rules: those without recursion, up to a size

    def _find_regular(self, name: str) -> None:
        """Depth first, on a list: chains of rules may be long."""
        stack = [name]
        open_rules: set[str] = set()
        while stack:
            current = stack[-1]
            if current in self._regular:
                stack.pop()
                continue
            inner = [each.name for each in _references(self._rules[current]) if each.name not in self._regular]
            if current in open_rules or not inner:
                # A reference that is still open here leads back: the rule is recursive.
                regex = None if inner else self._as_regex(self._rules[current])
                self._regular[current] = regex
                if regex is not None:
                    self._rule_sizes[current] = _num_nodes(regex)
                stack.pop()
                continue
            open_rules.add(current)
            stack.extend(inner)

    def _as_regex(self, node: Node) -> Regex | None:
        """`node` without references; None if that is impossible or too large."""
        if self._size(node) > _MAX_INLINED_NODES:
            return None
        regex = self._inlined(node)
        return regex if regex is not None and _depth(regex) <= _MAX_INLINED_DEPTH else None

    def _size(self, node: Node) -> int:
        """Nodes of `node` without references, before it is built: rules that double each other grow fast."""
        total = 0
        todo = [node]
        while todo and total <= _MAX_INLINED_NODES:
            each = todo.pop()
            match each:
                case Terminal(regex):
                    total += _num_nodes(regex)
                case Reference(name):
                    total += self._rule_sizes.get(name, _MAX_INLINED_NODES + 1)
                case Repetition(item):
                    total += 1
                    todo.append(item)
                case Sequence(parts) | Choice(parts):
                    total += 1
                    todo.extend(parts)
        return total

    def _inlined(self, node: Node) -> Regex | None:
        match node:
            case Terminal(regex):
                return regex
            case Reference(name):
                return self._regular.get(name)
            case Repetition(item, low, high):
                inner = self._inlined(item)
                return None if inner is None else repeat(inner, low, high)
            case Sequence(parts) | Choice(parts):
                regexes = [self._inlined(part) for part in parts]
                whole = [regex for regex in regexes if regex is not None]
                if len(whole) < len(regexes):
                    return None
                return seq(*whole) if isinstance(node, Sequence) else alt(*whole)

    # Writing

    def _name(self, name: str, todo: list[str]) -> str:
        """An expression for a rule."""
        if name not in self._names:
            regex = self._regular[name]
            if regex is not None:
                self._names[name] = self._writer.regex(regex)
            else:
                self._names[name] = self._writer.reserve_rule("r")
                todo.append(name)
        return self._names[name]

    def _expression(self, node: Node, todo: list[str]) -> str:
        """An expression for `node`, which must be finite."""
        if isinstance(node, Reference):
            return self._name(node.name, todo)
        regex = self._as_regex(node)
        if regex is not None:
            return self._writer.regex(regex)
        match node:
            case Sequence(items):
                return " ".join(self._expression(item, todo) for item in self._grouped(items))
            case Choice(options):
                possible = [option for option in options if _is_finite(option, self._finite)]
                return "(" + " | ".join(self._expression(option, todo) for option in possible) + ")"
            case Repetition(item, low, high):
                if not _is_finite(item, self._finite):
                    return '""'
                return f"({self._expression(item, todo)}){count_text(low, high)}"
            case Terminal(regex):
                return self._writer.regex(regex)

    def _grouped(self, items: tuple[Node, ...]) -> list[Node]:
        """Neighbours that are small expressions together are one."""
        groups: list[Node] = []
        run: list[Node] = []
        run_size = 0
        for item in items:
            size = self._size(item)
            if run and run_size + size > _MAX_INLINED_NODES:
                groups.append(run[0] if len(run) == 1 else Sequence(tuple(run)))
                run, run_size = [], 0
            run.append(item)
            run_size += size
        if run:
            groups.append(run[0] if len(run) == 1 else Sequence(tuple(run)))
        # One group that is all is no progress: its size leaves out what makes it too large, its depth.
        return list(items) if len(groups) == 1 else groups


def _num_nodes(regex: Regex) -> int:
    return 1 + sum(map(_num_nodes, _children(regex)))


def _depth(regex: Regex) -> int:
    return 1 + max(map(_depth, _children(regex)), default=0)


def _children(node: Regex) -> tuple[Regex, ...]:
    match node:
        case Seq(parts) | Alt(parts):
            return parts
        case Repeat(item):
            return (item,)
        case _:
            return ()
