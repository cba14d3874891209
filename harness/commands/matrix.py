"""Format × origin × backend: what ran, what vLLM refused and with which reason, what failed. Printed, and kept with the records.

With the directories of earlier runs, or one that holds them, it is made of their records; of what was recorded twice, the last named
counts. Without, one case for each way of quantizing is chosen, loaded and
converted on every backend, on a CPU that answers as the GPU architecture named, each architecture in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path

from cases.case import InvalidCase, MoECase
from harness import ledger
from harness.architectures import ARCHITECTURES, VARIABLE, Architecture, parse
from harness.backends import SPECS, Backend, UnknownBackend
from harness.commands.output import say
from harness.environment import child_environ
from harness.exits import Exit, Misuse
from harness.preflight import check
from harness.suite.options import made, parse_backend, parse_records
from reports.records import MERGED, Record, RecordsUnreadable, Status, gathered, merge, read, runs_below, source, write

EVERY = "all"
DEFAULT = "sm90"


def main(arguments: Namespace) -> int:
    """Exit 0 when every cell is as declared and as the ledger says, 1 otherwise. Raises Misuse or LedgerError."""
    from reports import matrix

    directory = parse_records(arguments.records) / f"{datetime.now():%Y%m%d-%H%M%S}-matrix-{os.getpid()}"
    backends = [parse_backend(name) for name in arguments.backend]
    if arguments.runs and arguments.architecture:
        raise Misuse("--architecture is loaded for where no RUN is named; records of runs say where they ran")
    if arguments.runs:
        records = recorded(arguments.runs, backends)
        write(made(directory) / MERGED, records)
    else:
        ledger.load(ledger.LEDGER)
        if Backend.INTERPRETER in backends:
            raise Misuse("the interpreter lane loads what the triton lane does: say --backend triton")
        chosen = architectures(arguments.architecture or [DEFAULT])
        check(Backend.INTERPRETER, "vllm")
        records = load(directory, chosen, backends)
    found = matrix.cells(records)
    matrix.write(directory, found)
    width = max(160, shutil.get_terminal_size().columns)
    say(matrix.render(found, width=width, color=sys.stdout.isatty()))
    news = [record for record in records if record.status is Status.NEW]
    for record in news:
        say(f"NEW {record.backend} {record.environment.get('architecture', '')} {record.pair}: {record.news.strip().partition(chr(10))[0]}")
    say(f"Records: {os.path.relpath(directory)}")
    return Exit.NEWS if news else Exit.AS_THE_LEDGER_SAYS


def architectures(names: list[str]) -> tuple[Architecture, ...]:
    """Those named; "all" is every one. Raises Misuse."""
    if EVERY in names:
        return tuple(ARCHITECTURES.values())
    return tuple(parse(name) for name in dict.fromkeys(names))


def load(directory: Path, chosen: tuple[Architecture, ...], backends: list[Backend]) -> list[Record]:
    """The records of one process for each architecture. Raises Misuse when one could not begin."""
    for architecture in chosen:
        names = [backend.value for backend in backends or Backend if SPECS[backend].needs_gpu]
        command = [sys.executable, "-m", "harness.matrix", str(made(directory)), architecture.name, *names]
        environment = child_environ() | {VARIABLE: architecture.name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode in (Exit.MISUSE, Exit.UNAVAILABLE):
            raise Misuse(done.stderr.strip().rpartition("moediff: ")[2])
        if done.returncode:
            sys.stderr.write(done.stderr)
    return merge(directory)


def recorded(names: list[str], backends: list[Backend]) -> list[Record]:
    """Records of runs, of directories of runs, or of files of records; of these backends, where any are named. Of what was recorded on
    one architecture more than once the last counts. Raises Misuse."""
    from reports.matrix import architecture

    runs = [run for name in names for run in (runs_below(Path(name)) if Path(name).is_dir() else [Path(name)])]
    records = [record for run in runs for record in _recorded(run)]
    if not records:
        raise Misuse(f"{', '.join(names)} holds no records; name the directory of a run that compared something")
    records = [record for record in records if not record.fake]
    if not records:
        raise Misuse(f"{', '.join(names)} holds records of a fake only; name the directory of a run of vLLM")
    of_these = [record for record in records if not backends or record.backend in backends]
    if not of_these:
        there = ", ".join(sorted({record.backend for record in records}))
        raise Misuse(f"no record is of {', '.join(backends)}; these runs are of {there}")
    return list({(record.backend, architecture(record), record.pair): record for record in of_these}.values())


def _recorded(run: Path) -> list[Record]:
    try:
        path = source(run) if run.is_dir() else run
        records = gathered(path) if path.is_dir() else read(path)
        for number, record in enumerate(records, 1):
            _check(record, f"{path}:{number}")
    except OSError as error:
        raise Misuse(
            f"{run} cannot be read ({error.strerror}); name the directory of a run, as the last line of `moediff run` does"
        ) from None
    except RecordsUnreadable as error:
        raise Misuse(f"{error}; name the directory of a run of this version") from None
    return records


def _check(record: Record, where: str) -> None:
    """Raises RecordsUnreadable for a record of what this version does not know."""
    from reports.matrix import FIELDS

    try:
        Backend.parse(record.backend)
        MoECase.from_id(record.case)
    except (UnknownBackend, InvalidCase) as error:
        raise RecordsUnreadable(f"{where}: not a record ({error})") from None
    if absent := [name for name in FIELDS if name not in record.fields]:
        raise RecordsUnreadable(f"{where}: not a record ('fields' lacks '{absent[0]}')")
