"""Run the pairs of a level, or of the cases named, in parallel; end with a summary and the place of the records."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from harness import ledger
from harness.exits import Exit, Misuse
from harness.pairs import parse_entry, parse_expression, parse_level, select
from harness.preflight import check
from harness.suite.options import made, parse_backend

SUITE = Path(__file__).parent.parent / "suite"


def main(arguments: Namespace) -> int:
    """Exit 0 when everything is as the ledger says, 1 when something new failed. Raises Misuse or LedgerError."""
    backend = parse_backend(arguments.backend)
    entry = None if arguments.entry is None else parse_entry(arguments.entry)
    pairs = select(parse_level(arguments.level), arguments.cases, entry)
    ledger.load(ledger.LEDGER)
    parse_expression(arguments.expression or "")
    made(Path(arguments.records))
    check(backend, arguments.subject)
    options = [f"--backend={backend}", f"--level={arguments.level}", f"--subject={arguments.subject}", f"--records={arguments.records}"]
    options += [f"--case={case}" for case in arguments.cases]
    options += [f"--entry={entry}"] if entry else []
    options += ["-k", arguments.expression] if arguments.expression else []
    # One worker at least, replaced as often as it dies: a crash takes neither this process nor the pairs after it.
    workers = ["-n", arguments.workers, f"--maxprocesses={len(pairs)}", f"--max-worker-restart={len(pairs)}", "--dist=worksteal"]
    code = pytest.main([str(SUITE), "-p", "harness.suite.plugin", "-p", "no:cacheprovider", "-rN", *workers, *options])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise Misuse(f"no pair matches -k '{arguments.expression}'; `moediff list --level {arguments.level}` prints the ids")
    return Exit.MISUSE if code == pytest.ExitCode.USAGE_ERROR else int(code)
