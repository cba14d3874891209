"""What loads, is refused or fails: one case for each way of quantizing, on every backend, for one GPU architecture, without a GPU.

``python -m harness.matrix DIRECTORY NAME BACKEND...`` is one process of `moediff matrix`: it answers as the architecture that
``MOEDIFF_ARCHITECTURE`` names, and writes a record for each (case, backend) as a worker of a run does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cases.case import Data, Entry, Level, MoECase
from cases.generate import pairs
from harness import ledger
from harness.architectures import VARIABLE, Architecture, requested
from harness.backends import SPECS, Backend
from harness.environment import environment
from harness.exits import Exit, Misuse
from harness.ledger import Ledger
from harness.load_ledger import LOAD, judge_loading
from references.vocabulary import Activation, Format
from reports.records import Record, Recorder, RecordsUnwritable, Start, Status, broke

if TYPE_CHECKING:
    from harness.subject import Subject

_PLAIN = (Activation.SILU, Activation.RELU2_NO_MUL)


def ways(level: Level = Level.NIGHTLY) -> tuple[MoECase, ...]:
    """One case for each checkpoint format, weight format, weight and activation scale, origin, gated or not: the smallest, of bf16 where
    there is one, with whole blocks and an activation that most kernels know."""
    found: dict[tuple[object, ...], MoECase] = {}
    for case, entry in pairs(level):
        if entry is Entry.LAYER and case.data is Data.DENSE and not case.bias and not case.router_weight_on_input:
            key = (case.checkpoint, case.origin, _weight(case), case.weight_scale, case.act_scale, case.activation.gated)
            if key not in found or _awkward(case) < _awkward(found[key]):
                found[key] = case
    return tuple(found.values())


def _weight(case: MoECase) -> Format | None:
    return case.weight if case.quantized else None


def _awkward(case: MoECase) -> tuple[bool, bool, bool, int]:
    whole = case.hidden % 128 == 0 and case.intermediate % 128 == 0
    return case.dtype is not Format.BF16, not whole, case.activation not in _PLAIN, case.experts * case.hidden * case.intermediate


def drive(architecture: Architecture, directory: Path, name: str, backends: Iterable[Backend]) -> Iterator[Record]:
    """Load every way on every backend, and write the records as they come. Raises SubjectUnavailable or Misuse."""
    from harness.subject.vllm_layer import VllmSubject

    known, recorder = ledger.load(ledger.LEDGER), Recorder(directory, name)
    here = environment() | {"architecture": architecture.name}
    for backend in backends:
        with _set(dict(SPECS[backend].environment)):
            began = time.perf_counter()
            subject = VllmSubject(SPECS[backend].moe_backend, device="cpu", interpreter=True)
            recorder.opened(subject.name, time.perf_counter() - began)
            for case in ways():
                start = Start(
                    case=case.id,
                    entry=Entry.LAYER.value,
                    backend=backend.value,
                    fields=asdict(case),
                    environment=here | {"subject": subject.name},
                    worker=name,
                    relation=LOAD,
                )
                yield _record(recorder, start, case, backend, architecture, subject, known)
    recorder.close()


def _record(
    recorder: Recorder, start: Start, case: MoECase, backend: Backend, architecture: Architecture, subject: Subject, known: Ledger
) -> Record:
    from harness.load_only import load_pair

    recorder.started(start)
    recorder.stage("load")
    try:
        result = load_pair(case, backend, architecture, subject)
    except Exception as error:  # ours: recorded, then shown with its traceback
        recorder.finished(broke(start, recorder.last_stage, f"{type(error).__name__}: {error}"))
        raise
    judged = judge_loading(known, result.verdict, case, backend)
    record = Record.of(
        start,
        verdict=result.verdict,
        status=Status(judged.standing) if judged.as_expected else Status.NEW,
        news="" if judged.as_expected else f"{judged.sentence}: {result.verdict.claim}",
        ledger=judged.issue.id if judged.issue else "",
        link=judged.issue.link if judged.issue else "",
        ran=result.extras,
        seconds=result.timings,
    )
    recorder.finished(record)
    return record


@contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables that a lane sets, while entered."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: list[str]) -> int:
    """One process: everything of one architecture."""
    from harness.subject import SubjectUnavailable

    directory, name, *backends = arguments
    try:
        architecture = requested()
        if architecture is None:
            raise Misuse(f"{VARIABLE} names no architecture")
        for _ in drive(architecture, Path(directory), name, [Backend(backend) for backend in backends]):
            pass
    except (SubjectUnavailable, Misuse, RecordsUnwritable) as error:
        sys.stderr.write(f"moediff: {error}\n")
        return int(getattr(error, "exit", Exit.MISUSE))
    return Exit.AS_THE_LEDGER_SAYS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
