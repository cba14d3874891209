"""What becomes of a checkpoint that is wrong: an error that names the tensor, or the reference's answer; anything else is a finding.

The checkpoint is a directory, read by vLLM's own loader: whether anything is missing can be known there only.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import torch

from cases.bad_checkpoints import CLAIMS, EXPECTED, Bad, Expect
from cases.batch import make_batch
from cases.case import Entry
from cases.checkpoint import make_checkpoint
from cases.spoil import Spoiled, spoil
from harness import load_shards
from harness.compare import compare
from harness.expected import expected
from harness.pipeline import PairResult
from harness.recipes import recipe
from harness.subject import LoadFailed, RunFailed
from harness.verdict import Outcome, Verdict
from references.formats import round_to

if TYPE_CHECKING:
    from harness.backends import Backend
    from harness.pairs import Pair
    from harness.subject.loading import Loads, ReadsDirectories
    from references.moe import Answer

_SAYS = {
    Expect.REFUSED: "must be refused by an error that names the tensor or file",
    Expect.ANSWERED: "must be refused by an error that names the tensor, or give the answer of the layer it means",
    Expect.NOT_FINITE: (
        "must be refused by an error that names the tensor, or give no finite number where it enters and the right ones elsewhere"
    ),
}


def run_bad(bad: Bad, pair: Pair, backend: Backend, subject: Loads) -> PairResult:
    """The verdict on one spoiled checkpoint. Signatures: ACCEPTED, UNNAMED:<error>, ZEROS, NAN, FINITE, WRONG, or what a run raised."""
    began = time.perf_counter()
    if bad is Bad.CUT_GROUP:
        verdict = load_shards.cut(pair.case, make_checkpoint(pair.case), backend, subject)
        return PairResult(verdict=verdict, timings={"loading": time.perf_counter() - began}, extras={"expects": EXPECTED[bad].value})
    spoiled = spoil(bad, pair.case, make_checkpoint(pair.case))
    extras: dict[str, object] = {"expects": EXPECTED[bad].value}
    verdict = _verdict(bad, pair, backend, subject, spoiled, extras)
    return PairResult(verdict=verdict, timings={"loading": time.perf_counter() - began}, extras=extras)


def _verdict(bad: Bad, pair: Pair, backend: Backend, subject: ReadsDirectories, spoiled: Spoiled, extras: dict[str, object]) -> Verdict:
    claim = f"{CLAIMS[bad]} {_SAYS[EXPECTED[bad]]}"

    def broken(signature: str, detail: str) -> Verdict:
        return Verdict(outcome=Outcome.NOT_IDENTICAL, claim=claim, detail=detail, signature=signature)

    try:
        loaded = subject.load_directory(pair.case, spoiled.checkpoint, spoiled.files)
        if EXPECTED[bad] is Expect.REFUSED:
            return broken("ACCEPTED", f"it was loaded without a word; changed: {', '.join(spoiled.names)}")
        batch = make_batch(pair.case)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)  # numpy's, of what is not finite on purpose
            ran = subject.run(loaded, batch)
    except LoadFailed as error:
        if any(name in error.detail for name in spoiled.names):
            extras["refused"] = error.detail
            return Verdict(outcome=Outcome.PASS, claim=f"{CLAIMS[bad]} is refused by an error that names it", detail=error.detail)
        kind = error.detail.partition(":")[0]
        return broken(f"UNNAMED:{kind}", f"the error names none of {', '.join(spoiled.names[:4])}: {error.detail}")
    except RunFailed as error:
        return broken(f"RAISED:{error.detail.partition(':')[0]}", f"it was loaded; the first forward raised {error.detail}")
    answer = expected(pair.case, recipe(pair.case, Entry.LAYER, backend), spoiled.means, batch)
    trouble = _compared(answer, ran.output, spoiled)
    if trouble is None:
        return Verdict(outcome=Outcome.PASS, claim=f"{CLAIMS[bad]} gives the answer of the layer it means")
    return broken(*trouble)


def _compared(answer: Answer, actual: torch.Tensor, spoiled: Spoiled) -> tuple[str, str] | None:
    """Signature and text of what is wrong with ``actual`` [M, H]; None when it is right."""
    routed = (answer.routing.topk_ids == spoiled.expert).any(1)
    entered = torch.zeros(actual.shape, dtype=torch.bool)
    if spoiled.channels is not None:
        entered = routed.unsqueeze(1) & spoiled.channels
        finite = entered & torch.isfinite(actual)
        if bool(finite.any()):
            zeros = bool((actual[entered] == 0).all())
            text = f"{int(finite.sum())} of the {int(entered.sum())} outputs that a value that is not finite enters are finite"
            return "ZEROS" if zeros else "FINITE", text
    honest = round_to(answer.expected, answer.output).to(actual.dtype)
    bad = compare(answer, torch.where(entered, honest, actual), repeat=None).bad
    if not bool(bad.any()):
        return None
    mine = actual[routed]
    what = "NAN" if bool((bad & torch.isnan(actual)).any()) else "ZEROS" if bool((mine == 0).all()) else "WRONG"
    token, channel = (int(i) for i in bad.nonzero()[0])
    return what, (
        f"{int(bad.sum())} of {bad.numel()} outputs are not the reference's, of {int(bad.any(1).sum())} tokens; first token {token}, "
        f"channel {channel}: expected {float(answer.expected[token, channel]):.6g}, actual {float(actual[token, channel]):.6g}"
    )
