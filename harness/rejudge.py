"""Judge a run again with the references, bounds and ledger of today: no GPU and no vLLM are needed.

``python -m harness.rejudge RUN INTO`` reads the records of a run and the outputs that were kept of what was new in it (suite/outputs.py),
writes the records as they stand now to the new directory INTO, prints what changed, and ends 1 when something is still new.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import judge, ledger
from harness.backends import Backend
from harness.compare import compare
from harness.expected import expected
from harness.ledger import Ledger
from harness.pairs import Pair
from harness.recipes import recipe
from harness.suite import outputs
from harness.suite.worker import judged_by
from harness.verdict import Outcome, Verdict
from reports.records import Record, Recorder, Status, read_worker, worker_files


def verdict_of(pair: Pair, backend: Backend, output: torch.Tensor) -> Verdict:
    """Of an output [M, H] that the pair gave on the backend."""
    how = recipe(pair.case, pair.entry, backend)
    checkpoint, batch = make_checkpoint(pair.case), make_batch(pair.case)
    answer = expected(pair.case, how, checkpoint, batch)
    return judge.judge(pair.case, how, checkpoint, batch, answer, output, compare(answer, output))


def again(record: Record, run: Path, known: Ledger) -> Record:
    """The record as it stands today. A verdict changes only where an output was kept, and never that two runs differed."""
    pair, backend, verdict = Pair(MoECase.from_id(record.case), Entry(record.entry)), Backend.parse(record.backend), record.verdict
    once = not record.relation and verdict.outcome is not Outcome.NONDETERMINISTIC
    if once and (file := outputs.file_of(run, record.pair)).exists():
        verdict = verdict_of(pair, backend, torch.load(file)["outputs"][record.pair])
    judged = judged_by(known, verdict, record, here=record.environment.get("vllm", ""), pair=pair, backend=backend)
    return replace(
        record,
        verdict=verdict,
        status=Status(judged.standing) if judged.as_expected else Status.NEW,
        news="" if judged.as_expected else judged.sentence,
        ledger=judged.issue.id if judged.issue else "",
        link=judged.issue.link if judged.issue else "",
    )


def main(arguments: Sequence[str]) -> int:
    """0: nothing is new any more; 1: something is; 2: not two directories, or the second exists."""
    if len(arguments) != 2 or not worker_files(run := Path(arguments[0])) or (into := Path(arguments[1])).exists():
        sys.stderr.write("rejudge: name the directory of a run, and one that does not exist yet\n")
        return 2
    known, new = ledger.load(ledger.LEDGER), 0
    for path in worker_files(run):
        recorder = Recorder(into, path.stem.removeprefix("worker-"))
        for record in read_worker(path).records:
            recorder.finished(now := again(record, run, known))
            new += now.status is Status.NEW
            was, stands = (f"{each.verdict.outcome} {each.status} {each.ledger}".strip() for each in (record, now))
            if was != stands:
                sys.stdout.write(f"{record.pair}: {was} -> {stands}\n")
            elif now.status is Status.NEW:
                sys.stdout.write(f"{record.pair}: still {stands} {now.verdict.signature}\n")
        recorder.close()
    sys.stdout.write(f"{new} still new\n")
    return int(new > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
