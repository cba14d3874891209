"""Which (case, entry) pairs a command asked for. No torch: the xdist controller and ``moediff list`` come through here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from _pytest.mark.expression import Expression  # not public, and what -k itself calls

from cases.case import Data, Entry, InvalidCase, Level, MoECase, entry_takes
from cases.generate import pairs
from cases.lattice_pairs import lattice_pairs
from harness.backends import Backend, declared_refusal, has_entry
from harness.exits import Misuse
from harness.relations import EXACT, Relation, asked

_LONGEST = 120  # characters of what is wrong that a message repeats
_DEEPER = 50  # parentheses: pytest and xdist stand further down the stack when they read -k


class Pair(NamedTuple):
    """A case and the door it enters vLLM by."""

    case: MoECase
    entry: Entry

    @property
    def id(self) -> str:
        """``case[entry]``: what pytest shows and ``-k`` matches."""
        return f"{self.case.id}[{self.entry}]"


class Related(NamedTuple):
    """An exact relation asked of a pair with lattice data."""

    relation: Relation
    pair: Pair

    @property
    def id(self) -> str:
        """``relation:case[entry]``."""
        return f"{self.relation}:{self.pair.id}"


def repeat(pair: Pair, backend: Backend, subject: str = "vllm") -> str:
    """The command that runs this pair alone."""
    other = "" if subject == "vllm" else f" --subject {subject}"
    return f"moediff run {pair.case.id} --entry {pair.entry} --backend {backend}{other}"


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def parse_level(text: str) -> Level:
    """Raises Misuse for an unknown level."""
    try:
        return Level(text)
    except ValueError:
        raise Misuse(f"unknown level '{text}'; the levels are {', '.join(Level)}") from None


def parse_entry(text: str) -> Entry:
    """Raises Misuse for an unknown entry."""
    try:
        return Entry(text)
    except ValueError:
        raise Misuse(f"unknown entry '{text}'; the entries are {', '.join(Entry)}") from None


def parse_case(text: str) -> MoECase:
    """Any valid id, listed in a level or not. Raises Misuse saying which rule of the id or of the case is broken."""
    try:
        return MoECase.from_id(text)
    except InvalidCase as error:
        shown = _shown(text)
        reason = str(error).replace(repr(text), repr(shown)) if text else str(error)
        raise Misuse(f"'{shown}' is not a case: {reason}; `moediff list` prints ids that are") from None


def parse_pair(text: str) -> tuple[MoECase, Entry | None]:
    """A case's id, or a pair's, ``case[entry]``, or ``relation:case[entry]``, as ``moediff list`` and records have it. Raises Misuse."""
    text = text.rpartition(":")[2]
    case_id, bracket, door = text.removesuffix("]").partition("[")
    if not bracket or not text.endswith("]"):
        return parse_case(text), None
    case, entry = parse_case(case_id), parse_entry(door)
    if not entry_takes(case, entry):
        raise Misuse(f"entry '{entry}' does not take this case; leave [{entry}] out to see through which it enters")
    return case, entry


def parse_expression(text: str) -> str:
    """What ``-k`` takes. Raises Misuse: under xdist a bad one would end every worker and not say why."""
    try:
        Expression.compile(text)
        if text.strip():
            Expression.compile(f"{'(' * _DEEPER}{text}{')' * _DEEPER}")
    except SyntaxError as error:
        raise Misuse(f"'{_shown(text)}' is not an expression for -k ({error.msg}); write words joined by and, or, not") from None
    except RecursionError:
        raise Misuse(f"'{_shown(text)}' is not an expression for -k (its parentheses are nested too deep); use fewer of them") from None
    return text


def select(level: Level, case_ids: Iterable[str] = (), entry: Entry | None = None) -> tuple[Pair, ...]:
    """The pairs of a level, or of the cases named, through one entry or all; in the generator's order.

    Raises:
        Misuse: an id that is not a case, or an entry that takes none of them.
    """
    named = [parse_case(text) for text in case_ids]
    through = [Pair(case, door) for case in named for door in Entry if entry_takes(case, door)]
    chosen = through if named else [Pair(*pair) for pair in pairs(level)]
    if entry is not None:
        chosen = [pair for pair in chosen if pair.entry is entry]
    if not chosen:
        raise Misuse(f"entry '{entry}' takes none of these cases; leave --entry out to run the one that does")
    return tuple(chosen)


def relate(level: Level, case_ids: Iterable[str], entry: Entry | None, backend: Backend) -> tuple[Related, ...]:
    """The exact relations of the level, or of the lattices among the cases named; one pair after another. Raises Misuse."""
    chosen = select(level, case_ids) if case_ids else [Pair(*pair) for pair in lattice_pairs(level)]
    lattices = [pair for pair in chosen if pair.case.data is Data.LATTICE and entry in (None, pair.entry)]
    runs = [pair for pair in lattices if has_entry(pair.entry, backend) and declared_refusal(pair.case, pair.entry, backend) is None]
    return tuple(Related(relation, pair) for pair in runs if backend in EXACT for relation in asked(pair.case, pair.entry, backend))
