"""Judge a run again with the references, bounds and ledger of today: no GPU and no vLLM are needed.

``python -m harness.rejudge RUN INTO`` reads the records of a run and the outputs that were kept of what was new or wrong in it
(suite/outputs.py), writes the records as they stand now, and their page, to the new directory INTO, and prints what changed. What a worker
began and did not finish stays so, and is new.

Exit codes: 0, nothing is new any more; 1, something is; 2, misuse: an argument, or what cannot be read or written.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from cases.batch import make_batch
from cases.checkpoint import make_checkpoint
from harness import judge, ledger
from harness.backends import SPECS, Backend
from harness.compare import compare
from harness.exits import Misuse
from harness.expected import expected
from harness.ledger import Ledger
from harness.pairs import Pair, parse_case, parse_entry
from harness.program import Parser, ended
from harness.recipes import recipe
from harness.refusals_architecture import declared
from harness.suite import outputs
from harness.suite.gather import gather
from harness.suite.worker import judged_by
from harness.verdict import Outcome, Verdict
from reports.records import KINDS, Record, Recorder, Status, cut_off, read_run, runs_below

_OF_THE_OUTPUT = (Outcome.MISMATCH, Outcome.PASS)  # every other verdict is of what was seen besides
_RAISED = (Outcome.LOAD_ERROR, Outcome.RUN_ERROR)
_THAT_LOAD = (KINDS[0], KINDS[2])  # pairs and loading checks, which ask the table as a run does
_STANDS = "the verdict stands as it was recorded"


def verdict_of(pair: Pair, backend: Backend, output: torch.Tensor) -> Verdict:
    """Of an output [M, H] that the pair gave on the backend."""
    how = recipe(pair.case, pair.entry, backend)
    checkpoint, batch = make_checkpoint(pair.case), make_batch(pair.case)
    answer = expected(pair.case, how, checkpoint, batch)
    return judge.judge(pair.case, how, checkpoint, batch, answer, output, compare(answer, output))


def again(record: Record, run: Path, known: Ledger) -> Record:
    """The record as it stands today. A verdict changes only where it is about an output that was kept, or about words of vLLM's that the
    table of backends declares by now; a pair that was cut off has none. Raises Misuse."""
    if cut_off(record):
        return record
    verdict, backend = record.verdict, Backend.parse(record.backend)
    pair = Pair(parse_case(record.case), parse_entry(record.entry))
    if outputs.wanted(record) and not record.relation and verdict.outcome in _OF_THE_OUTPUT:
        output = _kept(record, run)
        if output is not None and _is_about(verdict, output) and _known_here(record, pair, backend):
            verdict = verdict_of(pair, backend, output)
    elif verdict.outcome in _RAISED and record.kind in _THAT_LOAD and _in_vllms_words(verdict):
        refusals = declared(pair.case, pair.entry, backend)
        verdict = next((judge.refused(each, verdict.detail) for each in refusals if each.matches(verdict.detail)), verdict)
    judged = judged_by(
        Ledger(issues=()) if record.fake else known,
        verdict,
        record,
        here=record.environment.get("vllm", ""),
        pair=pair,
        backend=backend,
        loads_only=SPECS[backend].needs_gpu and "architecture" in record.environment,
    )
    return replace(
        record,
        verdict=verdict,
        status=Status(judged.standing) if judged.as_expected else Status.NEW,
        news="" if judged.as_expected else judged.sentence,
        ledger=judged.issue.id if judged.issue else "",
        link=judged.issue.link if judged.issue else "",
    )


def _in_vllms_words(verdict: Verdict) -> bool:
    """Whether vLLM raised, and not the harness or the device, whose signatures are other than what was said."""
    return bool(verdict.detail) and verdict.signature == judge.raised(verdict.outcome, verdict.detail).signature


def _known_here(record: Record, pair: Pair, backend: Backend) -> bool:
    """Whether the recipe that ran is the one of today: what is installed decides it, and what runs there need not be installed here."""
    ran, here = record.ran.get("recipe"), recipe(pair.case, pair.entry, backend).name
    if ran in (None, here):
        return True
    sys.stdout.write(f"{record.pair}: ran as {ran}, which is {here} with what is installed here; {_STANDS}\n")
    return False


def _kept(record: Record, run: Path) -> torch.Tensor | None:
    """The output of the record's pair, [M, H]; None where none was kept. Raises Misuse."""
    file = outputs.file_of(run, record.pair)
    if not file.exists():
        return None
    try:
        kept = torch.load(file)["outputs"][record.pair]
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise Misuse(f"{file} does not hold the output of {record.pair} ({type(error).__name__}); without that file {_STANDS}") from None
    if not isinstance(kept, torch.Tensor):
        raise Misuse(f"{file} holds no tensor for {record.pair}; without that file {_STANDS}")
    return kept


def _is_about(verdict: Verdict, output: torch.Tensor) -> bool:
    """Whether the worst element is the output's own: where runs may differ, the verdict is of the farther one, and the first is kept."""
    if not verdict.worst:
        return True
    row, column = cast("list[int]", verdict.worst["index"])
    told = torch.tensor(verdict.worst["actual"], dtype=torch.float64)
    inside = output.dim() == 2 and row < output.shape[0] and column < output.shape[1]
    return inside and torch.allclose(output[row, column].double(), told, rtol=0, atol=0, equal_nan=True)


def main(arguments: Sequence[str]) -> int:
    """One of the exit codes above."""
    return ended("rejudge", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    described = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m harness.rejudge", description=__doc__, formatter_class=described)
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument("into", metavar="INTO", type=Path, help="a directory that does not exist yet")
    typed = parser.parse_args(arguments)
    if runs_below(typed.run) != [typed.run]:
        raise Misuse(f"{typed.run} holds no records of a run; name a directory that a run made")
    if typed.into.exists():
        raise Misuse(f"{typed.into} exists; name a directory that does not exist yet")
    try:
        return int(_rejudge(typed.run, typed.into) > 0)
    except OSError as error:
        raise Misuse(f"{error.filename} cannot be read or written ({error.strerror}); name another directory") from None


def _rejudge(run: Path, into: Path) -> int:
    """How many are still new."""
    known, told = ledger.load(ledger.LEDGER), read_run(run)
    into.mkdir(parents=True)
    try:
        now = [again(record, run, known) for record in told]
    finally:
        into.rmdir()  # made only to see that it can be
    for worker in dict.fromkeys(record.worker for record in now):
        recorder = Recorder(into, worker)
        for record in now:
            if record.worker == worker and not cut_off(record):
                recorder.finished(record)
        recorder.close()
    for number, record in enumerate(filter(cut_off, now)):  # a file tells of one
        recorder = Recorder(into, f"{record.worker}-left-{number}")
        recorder.left(record)
        recorder.close()
    gather(into)
    for before, after in zip(told, now, strict=True):
        _tell(before, after)
    new = sum(record.status is Status.NEW for record in now)
    sys.stdout.write(f"{len(now)} records stand in {into} as of today: {new} still new\n")
    return new


def _tell(before: Record, now: Record) -> None:
    was, stands = (f"{each.verdict.outcome} {each.status} {each.ledger}".strip() for each in (before, now))
    if was != stands:
        sys.stdout.write(f"{now.pair}: {was} -> {stands}\n")
    elif now.status is Status.NEW:
        sys.stdout.write(f"{now.pair}: still {stands} {now.verdict.signature}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
