"""Print the (case, entry) pairs of a level, or its exact relations, one a line, in the order they are collected."""

from __future__ import annotations

from argparse import Namespace

from harness.commands.output import say
from harness.exits import Exit, Misuse
from harness.pairs import parse_entry, parse_level, relate, select
from harness.suite.options import parse_backend


def main(arguments: Namespace) -> int:
    """Raises Misuse, also when nothing matches."""
    level = parse_level(arguments.level)
    entry = None if arguments.entry is None else parse_entry(arguments.entry)
    if arguments.relations:
        backend = parse_backend(arguments.backend)
        related = [each for each in relate(level, (), entry, backend) if all(word in each.id for word in arguments.words)]
        found, count = [each.id for each in related], f"{len(related)} exact relations of {len({each.pair for each in related})} pairs"
        what = f"exact relation of level {level} on {backend}"
    else:
        pairs = [pair for pair in select(level, (), entry) if all(word in pair.id for word in arguments.words)]
        found, count = [pair.id for pair in pairs], f"{len(pairs)} pairs of {len({pair.case for pair in pairs})} cases"
        what = f"pair of level {level}"
    if not found:
        hint = "" if arguments.relations else "; lattice cases are listed with --relations"
        words = " and ".join(f"'{word}'" for word in arguments.words)
        raise Misuse(f"no {what}{f' has {words} in its id' if words else ''}; leave words or --entry out to see more{hint}")
    say(count if arguments.count else "\n".join(found))
    return Exit.AS_THE_LEDGER_SAYS
