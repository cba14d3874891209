"""A run that is continued: whether its records are of what runs now, and which pairs they answer for."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from cases.case import Level
from harness.backends import SPECS
from harness.environment import commit, gpu_names, version
from harness.exits import Misuse
from harness.suite.subjects import VLLM
from reports.records import MERGED, Record, RecordsUnreadable, read_worker, settled, to_ask_again, worker_files, writing

if TYPE_CHECKING:
    from pathlib import Path

    from harness.suite.options import Options

_WHOLE = (b'{"finished": ', b'{"opened": ')  # what a worker has nothing in progress after
_OF_CASES = re.compile(r"-cases-\d+$")  # as gather.directory names it
_OF_LEVEL = re.compile(rf"-({'|'.join(Level)})-\d+$")
_EVENTS = (*_WHOLE, b'{"started": ', b'{"stage": ')


def recorded(options: Options) -> frozenset[str]:
    """What the run that is continued has records of, but for what failed for want of a device: that is asked again.

    What it began and did not finish is taken out of its files, once all of them are known to be of such a run, and so is the merged file:
    should this run be killed, that would hide what it was at.

    Raises:
        Misuse: the run was of named cases and this one is not, a file is not a worker's, or the records are of another subject, vLLM,
            lane or GPU; then nothing is changed.
        RecordsUnwritable: a file cannot be cut or taken away.
    """
    if options.resume is None:
        return frozenset()
    if _OF_CASES.search(options.resume.name) and not options.cases:
        raise Misuse(f"{options.resume.name} is a run of named cases: name them again with --resume, or run without it")
    files = worker_files(options.resume)
    whole = {path: _whole(path) for path in files}
    found = _records(options.resume)
    for record in found:
        _same(options, record)
    for path, size in whole.items():
        if size < path.stat().st_size:
            with writing(path):
                os.truncate(path, size)
    with writing(merged := options.resume / MERGED):
        merged.unlink(missing_ok=True)
    return frozenset(record.pair for record in settled(found) if not to_ask_again(record))


def other_commits(options: Options) -> str:
    """A line where records of the run that is continued were made by another commit of the harness; "" where none were."""
    if options.resume is None:
        return ""
    now = commit()
    then = sorted({str(record.environment.get("commit", "")) or "none" for record in _records(options.resume)} - {now or "none"})
    if not then:
        return ""
    return (
        f"moediff: the run that is continued has records of harness commit {', '.join(then)}, and this is {now or 'none'}; "
        f"`python -m harness.rejudge {os.path.relpath(options.resume)} INTO` judges outputs that were kept as this one does"
    )


def other_level(options: Options) -> str:
    """A line where the run that is continued is named for another level than what is asked now; "" where it is not."""
    then = _OF_LEVEL.search(options.resume.name) if options.resume is not None and not options.cases else None
    if options.resume is None or then is None or then[1] == options.level:
        return ""
    return f"moediff: {options.resume.name} began at level {then[1]} and goes on at {options.level}: its records are then of both"


def _records(run: Path) -> list[Record]:
    return [record for path in worker_files(run) for record in read_worker(path).records]


def _whole(path: Path) -> int:
    """Bytes up to the end of the last record. Raises Misuse for what no worker writes, also in a last line that is half written."""
    try:
        read_worker(path)
        *lines, half = path.read_bytes().split(b"\n")
    except (OSError, RecordsUnreadable) as error:
        raise Misuse(f"{_first_line(error)}, so the run is not continued: take that file away, or run without --resume") from None
    if not any(half.startswith(event[: len(half)]) for event in _EVENTS):
        raise Misuse(f"{path}:{len(lines) + 1}: not a record, so the run is not continued: take that file away, or run without --resume")
    while lines and not lines[-1].startswith(_WHOLE):
        lines.pop()
    return sum(len(line) + 1 for line in lines)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _same(options: Options, record: Record) -> None:
    """Raises Misuse where the record is not of what would run now."""
    if record.backend != options.backend:
        raise Misuse(
            f"the run in '{options.resume}' was on backend '{record.backend}', not '{options.backend}': say --backend {record.backend}"
        )
    then, now = record.environment, _now(options)
    was = {
        "subject": _subject(str(then.get("subject", ""))),
        "vLLM": str(then.get("vllm", "")),
        "--architecture": str(then.get("architecture", "")),
        "GPU": _models(str(then.get("gpus", "")).split(", ")),
    }
    differ = [f"{what} '{was[what] or 'none'}', not '{now[what] or 'none'}'" for what in now if was[what] != now[what]]
    if differ:
        raise Misuse(f"the run in '{options.resume}' was of {' and '.join(differ)}: run without --resume, or name a run like this one")


def _now(options: Options) -> dict[str, str]:
    """What records of this run say; of GPUs only where it uses one."""
    if options.subject != VLLM:
        return {"subject": options.subject, "--architecture": options.architecture}
    gpu = SPECS[options.machine].needs_gpu
    now = {"subject": f"vllm ({'cuda' if gpu else 'interpreter'})", "vLLM": version("vllm") or "", "--architecture": options.architecture}
    return now | ({"GPU": _models(gpu_names())} if gpu else {})


def _subject(name: str) -> str:
    """A subject's own name as ``--subject`` has it, the device of vLLM with it: "fake:FAULT", "vllm (cuda)"."""
    words = name.replace("fake with ", "fake:").split()
    return f"{words[0]} {words[-1]}" if words[:1] == [VLLM] else " ".join(words)


def _models(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(sorted({name for name in names if name}))
