"""Run the pairs of a level, or of the cases named, in parallel; end with a summary and the place of the records."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import ledger
from harness.exits import Exit, Misuse
from harness.pairs import parse_expression, parse_pair
from harness.preflight import MODULES, check, require
from harness.suite.options import Options, made

SUITE = Path(__file__).parent.parent / "suite"


def main(arguments: Namespace) -> int:
    """Exit 0 when everything is as the ledger says, 1 when something new failed. Raises Misuse or LedgerError."""
    require(*MODULES)
    cases, entry, relations = pasted(arguments.cases, arguments.entry)
    expression = parse_expression(arguments.expression)
    if relations:
        expression = f"({expression}) and {relations}" if expression else relations
    asked = Options.parse(
        backend=arguments.backend,
        level=arguments.level,
        cases=cases,
        entry=entry,
        subject=arguments.subject,
        records=arguments.records,
        expression=expression,
        architecture=arguments.architecture,
        resume=arguments.resume,
    )
    ledger.load(ledger.LEDGER)
    workers, pairs = _workers(arguments.workers), len(asked.pairs())
    check(asked.machine, asked.subject)
    made(asked.resume or asked.records)
    options = [f"--level={asked.level}", f"--subject={asked.subject}"]
    options += [f"--resume={asked.resume}"] if asked.resume else [f"--records={asked.records}"]
    options += [f"--backend={asked.backend}"] if arguments.backend else []  # the header says why it is this one
    options += [f"--case={case}" for case in asked.cases]
    options += [f"--entry={asked.entry}"] if asked.entry else []
    options += [f"--architecture={asked.architecture}"] if asked.architecture else []
    options += ["-k", expression] if expression else []
    # One worker at least, replaced as often as it dies: a crash takes neither this process nor the pairs after it.
    several = ["-n", workers, f"--maxprocesses={pairs}", f"--max-worker-restart={pairs}", "--dist=worksteal"]
    code = pytest.main([str(SUITE), "-p", "harness.suite.plugin", "-p", "no:cacheprovider", "-rN", *several, *options])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        lists = f"moediff list --level {asked.level}"
        checks = f"`{lists} --checks --backend {asked.backend}` those of checks of loading and, on a GPU, of the device"
        raise Misuse(f"no pair matches -k '{expression}'; `{lists}` prints the ids, {checks}")
    return Exit.MISUSE if code == pytest.ExitCode.USAGE_ERROR else int(code)


def pasted(ids: Sequence[str], entry: str | None) -> tuple[list[str], str | None, str]:
    """Ids as a list or a record has them, ``relation:case[entry]``: cases, the entry, and what selects the relations, as ``-k`` takes it.

    Raises:
        Misuse: an id is none, several name different entries, or some name a relation and others none.
    """
    found = [parse_pair(each) for each in ids]
    entries = {only.value for _, only in found if only is not None} | ({entry} if entry else set())
    relations = {each.rpartition(":")[0] for each in ids}
    if len(entries) > 1 or (entries and not entry and any(only is None for _, only in found)):
        raise Misuse("the ids name different entries; run those of one entry at a time")
    if "" in relations and len(relations) > 1:
        raise Misuse("some ids name what is asked of a pair and others none; run them apart")
    asked = " or ".join(f"[{each}:" for each in sorted(relations) if each)
    return [case.id for case, _ in found], next(iter(entries), None), f"({asked})" if asked else ""


def _workers(text: str) -> str:
    """Raises Misuse."""
    if text != "auto" and not text.isdecimal():
        raise Misuse(f"-n takes a number of worker processes, 0 for none, or auto, not '{text}'")
    return text
