"""Regular expression trees → deterministic automata, from which EBNF rules are written.

xgrammar has a regular-expression node of its own, but 0.2.9 compiles some unions and optional groups wrongly
(`[ab]|[ab]{0,2}` also matches "aaaa", `0(x[0-9]+)?` matches "00"), and a deterministic automaton written as plain
rules is matched as fast, without ambiguity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from engine_actors.structured_output import charset
from engine_actors.structured_output.charset import Ranges
from engine_actors.structured_output.regex import Alt, Chars, Regex, Repeat, Seq

_Positions = frozenset[int]


@dataclass(frozen=True)
class State:
    """`edges`: disjoint sets of characters and the states they lead to, each of which can reach a final state."""

    is_final: bool
    edges: tuple[tuple[Ranges, int], ...]


def determinise(node: Regex, max_states: int) -> list[State] | None:
    """The automaton of `node`, which must match something; state 0 is the start. None: more than `max_states`."""
    positions = _Positioned(node)
    numbers: dict[_Positions, int] = {positions.start: 0}
    todo = [positions.start]
    states: list[State] = []
    for current in todo:
        edges = []
        for target, ranges in positions.steps(current).items():
            if target not in numbers:
                if len(numbers) >= max_states:
                    return None
                numbers[target] = len(numbers)
                todo.append(target)
            edges.append((ranges, numbers[target]))
        states.append(State(positions.end in current, tuple(edges)))
    return _without_dead_ends(states)


def _without_dead_ends(states: list[State]) -> list[State]:
    """The same states, without edges from where no final state can be reached."""
    sources: list[list[int]] = [[] for _ in states]
    for number, state in enumerate(states):
        for _, target in state.edges:
            sources[target].append(number)
    todo = [number for number, state in enumerate(states) if state.is_final]
    alive = set(todo)
    while todo:
        for source in sources[todo.pop()]:
            if source not in alive:
                alive.add(source)
                todo.append(source)
    return [State(state.is_final, tuple(edge for edge in state.edges if edge[1] in alive)) for state in states]


class _Positioned:
    """Thompson's construction: numbered positions, character steps and free steps between them."""

    def __init__(self, node: Regex) -> None:
        self._chars: list[tuple[Ranges, int] | None] = []
        self._free: list[list[int]] = []
        self._closures: dict[int, _Positions] = {}
        first = self._new()
        self.end = self._add(node, first)
        self.start = self._closure(first)

    def steps(self, current: _Positions) -> dict[_Positions, Ranges]:
        """What each set of characters leads to."""
        steps = [step for position in current if (step := self._chars[position]) is not None]
        bounds = sorted({bound for ranges, _ in steps for low, high in ranges for bound in (low, high + 1)})
        found: dict[_Positions, list[tuple[int, int]]] = {}
        for low, after in itertools.pairwise(bounds):
            targets = [target for ranges, target in steps if _contains(ranges, low)]
            if targets:
                merged = frozenset().union(*map(self._closure, targets))
                found.setdefault(merged, []).append((low, after - 1))
        return {target: charset.make_ranges(pairs) for target, pairs in found.items()}

    def _new(self) -> int:
        self._chars.append(None)
        self._free.append([])
        return len(self._free) - 1

    def _add(self, node: Regex, start: int) -> int:
        """Adds `node` after `start`; returns the position after it."""
        match node:
            case Chars(ranges):
                end = self._new()
                # A position holds one step only, so that each node begins on a position of its own.
                own = self._new()
                self._free[start].append(own)
                self._chars[own] = (ranges, end)
                return end
            case Seq(items):
                for item in items:
                    start = self._add(item, start)
                return start
            case Alt(options):
                return self._join(self._add(option, start) for option in options)
            case Repeat(item, low, high):
                for _ in range(low):
                    start = self._add(item, start)
                if high is None:
                    loop = self._new()
                    self._free[start].append(loop)
                    self._free[self._add(item, loop)].append(loop)
                    return self._join([loop])
                ends = [start]
                for _ in range(high - low):
                    ends.append(self._add(item, ends[-1]))
                return self._join(ends)

    def _join(self, ends: Iterable[int]) -> int:
        ends = list(ends)
        joined = self._new()
        for end in ends:
            self._free[end].append(joined)
        return joined

    def _closure(self, position: int) -> _Positions:
        """The positions with a step (and the end) that free steps reach."""
        known = self._closures.get(position)
        if known is None:
            seen = {position}
            todo = [position]
            while todo:
                for target in self._free[todo.pop()]:
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)
            known = frozenset(each for each in seen if self._chars[each] is not None or each == self.end)
            self._closures[position] = known
        return known


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)
