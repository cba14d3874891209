"""Print the (case, entry) pairs of a level, its exact relations or its checks, one a line, in the order they are collected."""

from __future__ import annotations

from argparse import Namespace

from harness import device_checks
from harness.backends import SPECS
from harness.commands.output import say
from harness.exits import Exit, Misuse
from harness.loading import questions
from harness.pairs import parse_entry, parse_level, relate, select
from harness.suite.options import parse_backend, runs

_NAMES = "leave words out; ids name codes and scales: e2m1-group16 is NVFP4, e2m1-group32 MXFP4, e4m3fn-group32 MXFP8, gptoss gpt-oss"


def main(arguments: Namespace) -> int:
    """Raises Misuse, also when nothing matches."""
    level = parse_level(arguments.level)
    entry = None if arguments.entry is None else parse_entry(arguments.entry)
    if arguments.relations:
        backend = parse_backend(arguments.backend)
        related = [each for each in relate(level, (), entry, backend) if all(word in each.id for word in arguments.words)]
        found, count = [each.id for each in related], f"{len(related)} exact relations of {len({each.pair for each in related})} pairs"
        what = f"exact relation of level {level} on {backend}"
    elif arguments.checks:
        backend = parse_backend(arguments.backend)
        loads, checks = (
            [each.id for each in asked if entry in (None, each.pair.entry) and all(word in each.id for word in arguments.words)]
            for asked in (questions(level, backend), device_checks.of(level, backend))
        )
        found, what = [*loads, *checks], f"check of loading or of a GPU of level {level} on {backend}"
        count = f"{len(loads)} loading checks" + (f", {len(checks)} device checks" if SPECS[backend].needs_gpu else "")
    else:
        pairs = [pair for pair in select(level, (), entry) if all(word in pair.id for word in arguments.words)]
        what = f"pair of level {level}"
        if arguments.backend is not None:
            backend = parse_backend(arguments.backend)
            pairs = [pair for pair in pairs if runs(pair, backend)]
            what = f"{what} on {backend}"
        found, count = [pair.id for pair in pairs], f"{len(pairs)} pairs of {len({pair.case for pair in pairs})} cases"
    if not found:
        if not arguments.words:
            through = f" enters by '{entry}'; leave --entry out" if entry else "; use --backend interpreter, or triton"
            raise Misuse(f"no {what}{through}")
        hint = "" if arguments.relations else "; lattice cases are listed with --relations, checks of loading and of GPUs with --checks"
        words = " and ".join(f"'{word}'" for word in arguments.words)
        raise Misuse(f"no {what} has {words} in its id; {_NAMES}{hint}")
    say(count if arguments.count else "\n".join(found))
    return Exit.AS_THE_LEDGER_SAYS
