"""Do two lanes that claim the same arithmetic agree? The interpreter lane stands for Triton's kernels on a GPU; here both have run.

``python -m harness.agreement write BACKEND FILE [LEVEL [PART/PARTS]]`` runs the pairs of a level that the backend claims and keeps their
outputs, which needs the backend's machine; in parts, several processes do. ``python -m harness.agreement compare FILE...`` needs none: of
files of two backends it prints what differs, and ends 1 when two outputs are farther apart than the lanes' own intervals allow, when one
lane raised where the other did not, or when their verdicts differ.

Set VLLM_USE_DEEP_GEMM=0 while writing on a GPU: where DeepGEMM is installed vLLM takes other activation scales, which is another recipe.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from harness.backends import Backend, declared_refusal, has_entry
from harness.compare import compare as judged
from harness.expected import expected
from harness.gpus import visible_gpus, worker_environment
from harness.pairs import Pair, select
from harness.recipes import recipe, written
from harness.subject import SubjectError
from harness.suite.subjects import VLLM, open_subject
from harness.verdict import Outcome
from references.formats import round_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SAVED_EVERY = 20  # pairs: a process that is ended leaves what it has

Outputs = dict[str, torch.Tensor | str]
"""``case[entry]`` -> output [M, H], or the first line of what was raised."""


class Part(NamedTuple):
    """One of ``parts`` stretches of a level."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From ``2/4``, counted from 1. Raises ValueError."""
        number, parts = (int(each) for each in text.split("/"))
        if not 1 <= number <= parts:
            raise ValueError(f"{text} is no part: the first is 1/{parts}, the last {parts}/{parts}")
        return cls(number, parts)

    def of(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Neighbours share kernels, so a part is a stretch."""
        return pairs[len(pairs) * (self.number - 1) // self.parts : len(pairs) * self.number // self.parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One pair on two lanes. differing: elements with other values; apart: elements farther apart than both lanes' intervals reach."""

    pair: str
    elements: int = 0
    differing: int = 0
    apart: int = 0
    otherwise: str = ""  # where the lanes' verdicts differ, or one raised: how each ended

    @property
    def holds(self) -> bool:
        """Whether the lanes agree."""
        return not self.apart and not self.otherwise


def asked(backend: Backend, level: Level) -> list[Pair]:
    """The level's pairs that the backend runs."""
    return [
        pair
        for pair in select(level)
        if has_entry(pair.entry, backend) and declared_refusal(*pair, backend) is None and written(*pair, backend)
    ]


def write(backend: Backend, file: Path, level: Level, part: Part) -> None:
    """Run a part of the level's pairs on the lane of this process, and keep what came out beside what the file holds."""
    os.environ.update(worker_environment(backend, f"gw{part.number}", visible_gpus(), part.parts))
    subject = open_subject(VLLM, backend)
    found = read([file])[backend] if file.exists() else {}
    pairs = [pair for pair in part.of(asked(backend, level)) if pair.id not in found]
    for number, (case, entry) in enumerate(pairs, 1):
        try:
            output: torch.Tensor | str = subject.run(subject.load(case, entry, make_checkpoint(case)), make_batch(case)).output
        except SubjectError as error:
            output = error.detail.splitlines()[0]
        found[f"{case.id}[{entry}]"] = output
        if number % _SAVED_EVERY == 0 or number == len(pairs):
            torch.save({"backend": backend.value, "outputs": found}, file)


def read(files: Sequence[Path]) -> dict[Backend, Outputs]:
    """What each backend gave, of all its parts."""
    lanes: dict[Backend, Outputs] = {}
    for file in files:
        held = torch.load(file)
        lanes.setdefault(Backend.parse(held["backend"]), {}).update(held["outputs"])
    return lanes


def compare(
    here: Backend, ours: Mapping[str, torch.Tensor | str], there: Backend, theirs: Mapping[str, torch.Tensor | str]
) -> list[Agreement]:
    """Every pair that both lanes ran."""
    return [_agreement(name, here, ours[name], there, theirs[name]) for name in ours if name in theirs]


def _agreement(name: str, here: Backend, ours: torch.Tensor | str, there: Backend, theirs: torch.Tensor | str) -> Agreement:
    if isinstance(ours, str) or isinstance(theirs, str):
        both = isinstance(ours, str) and isinstance(theirs, str)
        return Agreement(pair=name, otherwise="" if both else f"{here}: {_words(ours)}; {there}: {_words(theirs)}")
    text, _, door = name.removesuffix("]").partition("[")
    case, entry = MoECase.from_id(text), Entry(door)
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    answers = [expected(case, recipe(case, entry, backend), checkpoint, batch) for backend in (here, there)]
    ended = [judged(answer, output).outcome for answer, output in zip(answers, (ours, theirs), strict=True)]
    low = round_to(torch.minimum(answers[0].low, answers[1].low), case.dtype)
    high = round_to(torch.maximum(answers[0].high, answers[1].high), case.dtype)
    distance = (ours.double() - theirs.double()).abs()
    return Agreement(
        pair=name,
        elements=distance.numel(),
        differing=int((distance > 0).sum()),
        apart=int((distance > high - low).sum()) if ended[0] is Outcome.PASS else 0,  # both off by an upstream fault: far from any bound
        otherwise="" if ended[0] is ended[1] else f"{here}: {ended[0]}; {there}: {ended[1]}",
    )


def _words(output: torch.Tensor | str) -> str:
    return output if isinstance(output, str) else "an output"


def main(arguments: list[str]) -> int:
    """0: written, or the lanes agree; 1: they do not; 2: neither command."""
    match arguments:
        case ["write", backend, file, *rest] if len(rest) <= 2:
            level, part = [*rest, *("smoke", "1/1")[len(rest) :]]
            write(Backend.parse(backend), Path(file), Level(level), Part.parse(part))
            return 0
        case ["compare", *files] if len(lanes := read([Path(file) for file in files])) == 2:
            (here, ours), (there, theirs) = lanes.items()
            found = compare(here, ours, there, theirs)
            for each in found:
                if each.differing or each.otherwise:
                    text = f"{each.differing} of {each.elements} differ, {each.apart} too far apart {each.otherwise}"
                    sys.stdout.write(f"{each.pair}: {text.rstrip()}\n")
            same, bad = sum(not each.differing for each in found), sum(not each.holds for each in found)
            sys.stdout.write(f"{len(found)} pairs: {same} identical, {len(found) - same} with differences, {bad} that do not agree\n")
            return int(bad > 0)
    sys.stderr.write("agreement: write BACKEND FILE [LEVEL [PART/PARTS]], or compare FILE... of two backends\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
