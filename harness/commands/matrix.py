"""Format × origin × backend: what ran, what vLLM refused and with which reason, what failed. Printed, and kept with the records.

With the directories of earlier runs it is made of their records. Without, one case for each way of quantizing is chosen, loaded and
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
from reports.records import MERGED, Record, RecordsUnreadable, Status, merge, read, write

EVERY = "all"
DEFAULT = "sm90"


def main(arguments: Namespace) -> int:
    """Exit 0 when every cell is as declared and as the ledger says, 1 otherwise. Raises Misuse or LedgerError."""
    from reports import matrix

    directory = made(parse_records(arguments.records)) / f"{datetime.now():%Y%m%d-%H%M%S}-matrix-{os.getpid()}"
    if arguments.runs:
        records = [record for run in arguments.runs for record in _recorded(Path(run))]
        write(made(directory) / MERGED, records)
    else:
        ledger.load(ledger.LEDGER)
        backends = [parse_backend(name) for name in arguments.backend]
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


def _recorded(run: Path) -> list[Record]:
    path = run / MERGED if run.is_dir() else run
    try:
        records = read(path)
        for line, record in enumerate(records, 1):
            _check(record, f"{path}:{line}")
    except OSError as error:
        raise Misuse(
            f"{path} cannot be read ({error.strerror}); name the directory of a run, as the last line of `moediff run` does"
        ) from None
    except RecordsUnreadable as error:
        raise Misuse(f"{error}; name the directory of a run of this version") from None
    if not records:
        raise Misuse(f"{path} holds no records; name the directory of a run that compared something")
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
