"""Print the (case, entry) pairs of a level, one a line, in the order they are collected."""

from __future__ import annotations

from argparse import Namespace

from harness.commands.output import say
from harness.exits import Exit
from harness.pairs import parse_entry, parse_level, select


def main(arguments: Namespace) -> int:
    """Raises Misuse."""
    entry = None if arguments.entry is None else parse_entry(arguments.entry)
    pairs = [pair for pair in select(parse_level(arguments.level), (), entry) if all(word in pair.id for word in arguments.words)]
    if arguments.count:
        say(f"{len(pairs)} pairs of {len({pair.case for pair in pairs})} cases")
    else:
        say("\n".join(pair.id for pair in pairs))
    return Exit.AS_THE_LEDGER_SAYS
