"""Run the pairs of a level, or of the cases named, in parallel; end with a summary and the place of the records."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from harness import ledger
from harness.exits import Exit, Misuse
from harness.preflight import MODULES, check, require
from harness.suite.options import Options, made

SUITE = Path(__file__).parent.parent / "suite"


def main(arguments: Namespace) -> int:
    """Exit 0 when everything is as the ledger says, 1 when something new failed. Raises Misuse or LedgerError."""
    require(*MODULES)
    asked = Options.parse(
        backend=arguments.backend,
        level=arguments.level,
        cases=arguments.cases,
        entry=arguments.entry,
        subject=arguments.subject,
        records=arguments.records,
        expression=arguments.expression,
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
    options += ["-k", arguments.expression] if arguments.expression else []
    # One worker at least, replaced as often as it dies: a crash takes neither this process nor the pairs after it.
    several = ["-n", workers, f"--maxprocesses={pairs}", f"--max-worker-restart={pairs}", "--dist=worksteal"]
    code = pytest.main([str(SUITE), "-p", "harness.suite.plugin", "-p", "no:cacheprovider", "-rN", *several, *options])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise Misuse(f"no pair matches -k '{arguments.expression}'; `moediff list --level {asked.level}` prints the ids")
    return Exit.MISUSE if code == pytest.ExitCode.USAGE_ERROR else int(code)


def _workers(text: str) -> str:
    """Raises Misuse."""
    if text != "auto" and not text.isdecimal():
        raise Misuse(f"-n takes a number of worker processes, 0 for none, or auto, not '{text}'")
    return text
