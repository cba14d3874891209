"""Do two lanes that claim the same arithmetic agree? The interpreter lane stands for Triton's kernels on a GPU; here both have run.

``python -m harness.agreement write BACKEND FILE [LEVEL]`` runs every pair of a level that the backend claims and keeps the outputs, which
needs the backend's machine. ``python -m harness.agreement compare BACKEND FILE BACKEND FILE`` needs neither: it prints what differs, and
ends 1 when two outputs are farther apart than the lanes' own intervals allow, or one lane raised where the other did not.

Set VLLM_USE_DEEP_GEMM=0 while writing on a GPU: where DeepGEMM is installed vLLM takes other activation scales, which is another recipe.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from cases.generate import pairs
from harness.backends import Backend, declared_refusal, has_entry
from harness.expected import expected
from harness.gpus import visible_gpus, worker_environment
from harness.recipes import recipe, written
from harness.subject import SubjectError
from harness.suite.subjects import VLLM, open_subject
from references.formats import round_to

if TYPE_CHECKING:
    from collections.abc import Mapping

Outputs = dict[str, torch.Tensor | str]
"""``case[entry]`` -> output [M, H], or the first line of what was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One pair on two lanes. differing: elements with other values; apart: elements farther apart than both lanes' intervals reach."""

    pair: str
    elements: int
    differing: int
    apart: int
    raised: str = ""  # by one lane and not by the other

    @property
    def holds(self) -> bool:
        """Whether the lanes agree."""
        return not self.apart and not self.raised


def write(backend: Backend, level: Level) -> Outputs:
    """Run the level's pairs on the lane of this process."""
    os.environ.update(worker_environment(backend, "main", visible_gpus()))
    subject = open_subject(VLLM, backend)
    found: Outputs = {}
    for case, entry in pairs(level):
        if not has_entry(entry, backend) or declared_refusal(case, entry, backend) is not None or not written(case, entry, backend):
            continue
        try:
            output: torch.Tensor | str = subject.run(subject.load(case, entry, make_checkpoint(case)), make_batch(case)).output
        except SubjectError as error:
            output = error.detail.splitlines()[0]
        found[f"{case.id}[{entry}]"] = output
    return found


def compare(
    here: Backend, ours: Mapping[str, torch.Tensor | str], there: Backend, theirs: Mapping[str, torch.Tensor | str]
) -> list[Agreement]:
    """Every pair that both lanes ran."""
    return [_agreement(name, here, ours[name], there, theirs[name]) for name in ours if name in theirs]


def _agreement(name: str, here: Backend, ours: torch.Tensor | str, there: Backend, theirs: torch.Tensor | str) -> Agreement:
    if isinstance(ours, str) or isinstance(theirs, str):
        both = isinstance(ours, str) and isinstance(theirs, str)
        words = "" if both else f"{here}: {_words(ours)}; {there}: {_words(theirs)}"
        return Agreement(pair=name, elements=0, differing=0, apart=0, raised=words)
    text, _, door = name.removesuffix("]").partition("[")
    case, entry = MoECase.from_id(text), Entry(door)
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    answers = [expected(case, recipe(case, entry, backend), checkpoint, batch) for backend in (here, there)]
    low = round_to(torch.minimum(answers[0].low, answers[1].low), case.dtype)
    high = round_to(torch.maximum(answers[0].high, answers[1].high), case.dtype)
    distance = (ours.double() - theirs.double()).abs()
    return Agreement(pair=name, elements=distance.numel(), differing=int((distance > 0).sum()), apart=int((distance > high - low).sum()))


def _words(output: torch.Tensor | str) -> str:
    return output if isinstance(output, str) else "an output"


def main(arguments: list[str]) -> int:
    """0: written, or the lanes agree; 1: they do not; 2: neither command."""
    match arguments:
        case ["write", backend, file, *level]:
            torch.save(write(Backend.parse(backend), Level(level[0]) if level else Level.SMOKE), file)
            return 0
        case ["compare", here, ours, there, theirs]:
            found = compare(Backend.parse(here), torch.load(Path(ours)), Backend.parse(there), torch.load(Path(theirs)))
            for each in found:
                if each.differing or each.raised:
                    sys.stdout.write(f"{each.pair}: {each.differing} of {each.elements} differ, {each.apart} too far apart {each.raised}\n")
            same, bad = sum(not each.differing for each in found), sum(not each.holds for each in found)
            sys.stdout.write(f"{len(found)} pairs: {same} identical, {len(found) - same} with differences, {bad} that do not agree\n")
            return int(bad > 0)
    sys.stderr.write("agreement: write BACKEND FILE [LEVEL], or compare BACKEND FILE BACKEND FILE\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
