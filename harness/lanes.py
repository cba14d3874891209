"""The nightly matrix: one lane per (backend, architecture), read from the enum. A CI job per lane is started from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cases.case import Level
from harness.backends import SPECS, Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One job. lane: the tox environment, which is the backend's name; architecture: the label of the machine that runs it."""

    lane: str
    architecture: str
    gpu: bool
    command: str


def lanes(level: Level = Level.NIGHTLY) -> tuple[Lane, ...]:
    """Every lane, in the enum's order."""
    return tuple(
        Lane(
            lane=backend.value,
            architecture=architecture,
            gpu=SPECS[backend].needs_gpu,
            command=f"tox run -e {backend} -- --level {level}",
        )
        for backend in Backend
        for architecture in SPECS[backend].architectures
    )


def matrix(level: Level = Level.NIGHTLY) -> str:
    """``{"include": [...]}`` on one line: what a workflow's ``strategy.matrix`` takes."""
    return json.dumps({"include": [asdict(lane) for lane in lanes(level)]})
