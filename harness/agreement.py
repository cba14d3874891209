"""Do two lanes that claim the same arithmetic agree? The interpreter lane stands for Triton's kernels on a GPU; here both have run.

``python -m harness.agreement write BACKEND FILE [LEVEL [PART/PARTS]]`` runs the pairs of a level that the backend claims and keeps their
outputs, which needs the backend's machine; in parts, several processes do, each with a file of its own. ``python -m harness.agreement
compare FILE...`` needs none: of files of two backends it prints what differs.

Exit codes: 0, written, or the lanes agree; 1, two outputs are farther apart than the lanes' own intervals allow, or one lane raised where
the other did not, or their verdicts differ; 2, misuse: an argument, a file that cannot be read or written, or nothing to compare; 125, this
machine cannot run that backend.

Set VLLM_USE_DEEP_GEMM=0 while writing on a GPU: where DeepGEMM is installed vLLM takes other activation scales, which is another recipe.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from cases.batch import make_batch
from cases.case import Level
from cases.checkpoint import make_checkpoint
from harness.backends import Backend, declared_refusal, has_entry
from harness.compare import compare as judged
from harness.exits import Exit, Misuse
from harness.expected import expected
from harness.gpus import visible_gpus, worker_environment
from harness.pairs import Pair, parse_case, parse_entry, parse_level, select
from harness.preflight import check
from harness.program import Parser, ended, writing
from harness.recipes import recipe, written
from harness.subject import SubjectError
from harness.suite.options import parse_backend
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
        """From ``2/4``, counted from 1. Raises Misuse."""
        number, slash, parts = text.partition("/")
        if not (slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
            raise Misuse(f"'{text}' is no part of a level; of four parts the first is 1/4 and the last 4/4")
        return cls(int(number), int(parts))

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
    """Run a part of the level's pairs on the lane of this process, and keep what came out beside what the file holds.

    Raises:
        Misuse: the file is another backend's, or cannot be read or written; or what keeps the backend from running here.
        SubjectUnavailable: vLLM cannot be driven here.
    """
    check(backend, VLLM)
    found = _held(file, backend)
    os.environ.update(worker_environment(backend, f"gw{part.number}", visible_gpus(), part.parts))
    subject = open_subject(VLLM, backend)
    pairs = [pair for pair in part.of(asked(backend, level)) if pair.id not in found]
    for number, (case, entry) in enumerate(pairs, 1):
        try:
            output: torch.Tensor | str = subject.run(subject.load(case, entry, make_checkpoint(case)), make_batch(case)).output
        except SubjectError as error:
            output = error.detail.splitlines()[0]
        found[f"{case.id}[{entry}]"] = output
        if number % _SAVED_EVERY == 0 or number == len(pairs):
            _save(file, backend, found)


def _held(file: Path, backend: Backend) -> Outputs:
    """What the file holds; saved again, so that one that cannot be written is told before hours of work. Raises Misuse."""
    lanes = read([file]) if file.exists() else {backend: {}}
    if backend not in lanes:
        raise Misuse(f"{file} holds outputs of {', '.join(lanes)}; name another file for those of {backend}")
    _save(file, backend, lanes[backend])
    return lanes[backend]


def _save(file: Path, backend: Backend, outputs: Outputs) -> None:
    """Whole or not at all. Raises Misuse."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    with writing(file):
        with unfinished.open("wb") as stream:
            torch.save({"backend": backend.value, "outputs": outputs}, stream)
        unfinished.replace(file)


def read(files: Sequence[Path]) -> dict[Backend, Outputs]:
    """What each backend gave, of all its parts. Raises Misuse for a file that ``write`` did not make."""
    lanes: dict[Backend, Outputs] = {}
    for file in files:
        try:
            held = torch.load(file)
            backend, outputs = held["backend"], dict(held["outputs"])
        except OSError as error:
            raise Misuse(f"{file} cannot be read ({error.strerror}); name files that `agreement write` made") from None
        except (EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
            raise Misuse(f"{file} is no file of `agreement write` ({type(error).__name__}); name files that it made") from None
        lanes.setdefault(parse_backend(str(backend)), {}).update(outputs)
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
    case, entry = _pair(name)
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    answers = [expected(case, recipe(case, entry, backend), checkpoint, batch) for backend in (here, there)]
    outcomes = [judged(answer, output).outcome for answer, output in zip(answers, (ours, theirs), strict=True)]
    if ours.shape != theirs.shape:
        return Agreement(pair=name, otherwise=f"{here}: {list(ours.shape)}; {there}: {list(theirs.shape)}")
    low = round_to(torch.minimum(answers[0].low, answers[1].low), case.dtype)
    high = round_to(torch.maximum(answers[0].high, answers[1].high), case.dtype)
    other = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    apart = other & ~((ours.double() - theirs.double()).abs() <= high - low)
    return Agreement(
        pair=name,
        elements=other.numel(),
        differing=int(other.sum()),
        apart=int(apart.sum()) if outcomes[0] is Outcome.PASS else 0,  # both off by an upstream fault: far from any bound
        otherwise="" if outcomes[0] is outcomes[1] else f"{here}: {outcomes[0]}; {there}: {outcomes[1]}",
    )


def _words(output: torch.Tensor | str) -> str:
    return output if isinstance(output, str) else "an output"


def _pair(name: str) -> Pair:
    """From ``case[entry]``. Raises Misuse."""
    case, _, entry = name.removesuffix("]").partition("[")
    return Pair(parse_case(case), parse_entry(entry))


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises Misuse."""
    whole = Parser(prog="python -m harness.agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(dest="command", metavar="write|compare", required=True)
    command = commands.add_parser("write", help="run a level on a backend and keep its outputs")
    command.add_argument("backend", metavar="BACKEND")
    command.add_argument("file", metavar="FILE", type=Path)
    command.add_argument("level", metavar="LEVEL", nargs="?", default=Level.SMOKE.value, help=f"{', '.join(Level)}; default: smoke")
    command.add_argument("part", metavar="PART/PARTS", nargs="?", default="1/1", help="of the level, as 2/4; default: all")
    command = commands.add_parser("compare", help="say where the outputs of two backends differ")
    command.add_argument("files", metavar="FILE", type=Path, nargs="+")
    return whole.parse_args(arguments)


def _run(arguments: Sequence[str]) -> int:
    typed = _arguments(arguments)
    if typed.command == "write":
        write(parse_backend(typed.backend), typed.file, parse_level(typed.level), Part.parse(typed.part))
        return Exit.AS_THE_LEDGER_SAYS
    lanes = read(typed.files)
    if len(lanes) != 2:
        raise Misuse(f"these are files of {', '.join(lanes)}; compare takes files of two backends")
    (here, ours), (there, theirs) = lanes.items()
    found = compare(here, ours, there, theirs)
    if not found:
        raise Misuse(f"no pair was run on both {here} and {there}; write both files of the same level")
    for each in found:
        if each.differing or each.otherwise:
            text = f"{each.differing} of {each.elements} differ, {each.apart} too far apart {each.otherwise}"
            sys.stdout.write(f"{each.pair}: {text.rstrip()}\n")
    same, bad = sum(not (each.differing or each.otherwise) for each in found), sum(not each.holds for each in found)
    sys.stdout.write(f"{len(found)} pairs: {same} identical, {len(found) - same} with differences, {bad} that do not agree\n")
    return int(bad > 0)


def main(arguments: Sequence[str]) -> int:
    """One of the exit codes above."""
    return ended("agreement", lambda: _run(arguments))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
