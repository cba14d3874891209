"""What is asked of loading: which question of which pairs. No torch: tests are collected from here."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from cases.case import Entry, Level
from cases.generate import pairs
from harness.backends import Backend, has_entry
from harness.pairs import Pair
from harness.suite.subjects import VLLM

if TYPE_CHECKING:
    from harness.suite.options import Options


class Question(StrEnum):
    """Closed. Values are what test ids, records and the ledger say."""

    LOADED = "loaded"  # every oracle of harness/load_oracles.py that layer depth can answer


class Asked(NamedTuple):
    """A question asked of a pair."""

    question: Question
    pair: Pair

    @property
    def id(self) -> str:
        """What pytest shows and ``-k`` matches."""
        return f"{self.question}:{self.pair.id}"


def questions(level: Level, backend: Backend) -> tuple[Asked, ...]:
    """Every question of a level, in the generator's order."""
    if not has_entry(Entry.LAYER, backend):
        return ()
    return about([Pair(*pair) for pair in pairs(level)])


def about(chosen: list[Pair]) -> tuple[Asked, ...]:
    """The questions asked of these pairs: those that enter by the layer."""
    return tuple(Asked(question, pair) for pair in chosen if pair.entry is Entry.LAYER for question in Question)


def chosen(options: Options) -> tuple[Asked, ...]:
    """What a run asks: of its level, or of the cases named. A fake subject loads nothing. Raises Misuse."""
    if options.subject != VLLM or options.entry not in (None, Entry.LAYER):
        return ()
    return about(list(options.pairs())) if options.cases else questions(options.level, options.backend)
