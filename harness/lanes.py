"""The nightly matrix: one lane per (backend, architecture), read from the enum. A CI job per lane is started from it.

Lanes that this harness cannot drive yet, of GPUs that are not NVIDIA's, are there only where they are named.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from cases.case import Level
from harness.backends import SPECS, Backend
from harness.exits import Misuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One job. lane: the tox environment, which is the backend's name; architecture: the label of the machine that runs it;
    driven: whether this harness can drive that machine: a job of one that it cannot ends with 125."""

    lane: str
    architecture: str
    gpu: bool
    driven: bool
    command: str


def driven(architecture: str) -> bool:
    """Whether this harness can drive the machine: a CPU, or NVIDIA's GPUs."""
    return architecture == "cpu" or architecture.startswith("sm")


def parse_architecture(text: str) -> str:
    """The label of a machine that some lane runs on. Raises Misuse."""
    known = list(dict.fromkeys(each for spec in SPECS.values() for each in spec.architectures))
    if text not in known:
        raise Misuse(f"no lane runs on '{text}'; the architectures of lanes are {', '.join(known)}")
    return text


def lanes(level: Level = Level.NIGHTLY, backends: Collection[Backend] = (), architectures: Collection[str] = ()) -> tuple[Lane, ...]:
    """Of these backends and architectures, in the enum's order; where neither is named, every lane that is driven.

    Raises:
        Misuse: none of the backends runs on any of the architectures.
    """
    found = tuple(
        Lane(
            lane=backend.value,
            architecture=architecture,
            gpu=SPECS[backend].needs_gpu,
            driven=driven(architecture),
            command=f"tox run -e {backend} -- --level {level}",
        )
        for backend in Backend
        for architecture in SPECS[backend].architectures
        if not backends or backend in backends
        if not architectures or architecture in architectures
        if backends or architectures or driven(architecture)
    )
    if not found:
        on = ", ".join(dict.fromkeys(each for backend in backends for each in SPECS[backend].architectures))
        raise Misuse(
            f"{', '.join(backends)} runs on {on}, not on {', '.join(architectures)}: leave --architecture out, or name one of these"
        )
    return found


def matrix(level: Level = Level.NIGHTLY, backends: Collection[Backend] = (), architectures: Collection[str] = ()) -> str:
    """``{"include": [...]}`` on one line: what a workflow's ``strategy.matrix`` takes. Raises Misuse as ``lanes`` does."""
    return json.dumps({"include": [asdict(lane) for lane in lanes(level, backends, architectures)]})
