"""Two states, one pair: whether they differ, at which stage, with which symptom, and where first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bisect.observe import Observation
from harness.verdict import Outcome

if TYPE_CHECKING:
    import torch

MEMORY = 1.25  # parameters after loading larger or smaller by this factor are a symptom (a second copy of a half is 1.5)
SPEED = 3.0  # load and run together slower or faster by this factor, and by SPEED_SECONDS
SPEED_SECONDS = 0.5


class Stage(StrEnum):
    """Where a pair stopped, or what was looked at."""

    IMPORT = "import"
    LOAD = "load"
    RUN = "run"


class Symptom(StrEnum):
    """How two states differ, the gravest first."""

    UNAVAILABLE = "unavailable"
    ERROR = "error"
    REFUSED = "refused"
    NUMERIC = "numeric"  # at stage load when the loaded parameters differ already
    CONTROL = "control"  # the scales of an expert without tokens matter
    MEMORY = "memory"
    SPEED = "speed"
    BITS = "bits"  # both pass, not bit for bit alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How ``after`` differs from ``before`` on one pair; ``first`` names the first parameter or output element that does."""

    pair: str
    before: Observation
    after: Observation
    stage: Stage
    symptom: Symptom
    first: str = ""


def margin_class(observation: Observation) -> str:
    """Coarse enough that only what a reader would care about changes it."""
    margin = observation.verdict.margin
    if margin is None:
        return "none"
    if math.isnan(margin) or margin > 10:
        return "far outside"
    return "exact" if margin == 0 else "inside" if margin <= 1 else "outside"


_PLACE = {
    Outcome.UNAVAILABLE: (Stage.IMPORT, Symptom.UNAVAILABLE),
    Outcome.LOAD_ERROR: (Stage.LOAD, Symptom.ERROR),
    Outcome.UNSUPPORTED: (Stage.LOAD, Symptom.REFUSED),
    Outcome.RUN_ERROR: (Stage.RUN, Symptom.ERROR),
}


def compare(before: Observation, after: Observation, *, bits: bool = False, speed: bool = False) -> Difference | None:
    """None when outcome, signature and margin class agree (and, on request, every bit and the speed)."""
    found: tuple[Stage, Symptom] | None = None
    if (before.signature, margin_class(before)) != (after.signature, margin_class(after)):
        outcomes = (after.verdict.outcome, before.verdict.outcome)
        loaded = before.parameters == after.parameters or not (before.parameters and after.parameters)
        numeric = (Stage.RUN if loaded else Stage.LOAD, Symptom.NUMERIC)
        found = next((_PLACE[outcome] for outcome in outcomes if outcome in _PLACE), numeric)
    elif before.control != after.control:
        found = (Stage.RUN, Symptom.CONTROL)
    elif _apart(before.loaded_bytes, after.loaded_bytes, MEMORY):
        found = (Stage.LOAD, Symptom.MEMORY)
    elif speed and _slower(before, after):
        found = (Stage.RUN, Symptom.SPEED)
    elif bits and before.parameters != after.parameters:
        found = (Stage.LOAD, Symptom.BITS)
    elif bits and before.output != after.output:
        found = (Stage.RUN, Symptom.BITS)
    if found is None:
        return None
    return Difference(pair=before.pair, before=before, after=after, stage=found[0], symptom=found[1])


def _apart(a: float, b: float, factor: float) -> bool:
    return min(a, b) > 0 and max(a, b) >= factor * min(a, b)


def _slower(before: Observation, after: Observation) -> bool:
    a, b = (sum(each.seconds.get(stage, 0.0) for stage in ("load", "run")) for each in (before, after))
    return _apart(a, b, SPEED) and abs(a - b) >= SPEED_SECONDS


def changed_bits(difference: Difference) -> str:
    """Every parameter whose bits differ after loading, and whether the output's do, in words; "" where a side has none of them."""
    old, new = difference.before, difference.after
    if not (old.parameters and new.parameters) and not (old.output and new.output):
        return ""
    names = [name for name in {**old.parameters, **new.parameters} if old.parameters.get(name) != new.parameters.get(name)]
    parts = [f"parameter{'s' if len(names) > 1 else ''} {', '.join(names)}"] if names else []
    return " and ".join([*parts, *(["the output"] if old.output and new.output and old.output != new.output else [])])


def first_difference(difference: Difference, before: Path, after: Path) -> str:
    """In words: the first parameter that differs after loading, else the first output element, from tensors that the workers kept."""
    old, new = difference.before, difference.after
    if not old.parameters or not new.parameters:
        return ""
    for name in [*old.parameters, *(name for name in new.parameters if name not in old.parameters)]:
        if old.parameters.get(name) == new.parameters.get(name):
            continue
        if name not in new.parameters or name not in old.parameters:
            return f"loading differs first in parameter {name}: there only {'after' if name in new.parameters else 'before'}"
        told = _element(_kept(before)["parameters"][name], _kept(after)["parameters"][name])
        return f"loading differs first in parameter {name}{told}"
    if old.output == new.output or old.output is None or new.output is None:
        return "loading and output are bit for bit alike" if old.output == new.output and old.output else "loading is bit for bit alike"
    return f"loading is bit for bit alike; the output differs first at {_element(_kept(before)['output'], _kept(after)['output'])}"


def _kept(path: Path) -> dict[str, Any]:
    import torch

    kept: dict[str, Any] = torch.load(path, weights_only=True)
    return kept


def _element(old: torch.Tensor, new: torch.Tensor) -> str:
    """``[i, j]: old -> new (n of m elements differ)``, or the shapes or dtypes where these differ."""
    import torch

    if old.shape != new.shape or old.dtype != new.dtype:
        return f": {_kind(old)} -> {_kind(new)}"
    width = old.element_size()
    bytes_differ = old.contiguous().reshape(-1).view(torch.uint8) != new.contiguous().reshape(-1).view(torch.uint8)
    differs = bytes_differ.reshape(-1, width).any(1)
    flat = int(differs.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), old.shape)] if old.dim() else []
    values = (float(each.reshape(-1)[flat]) for each in (old, new))
    return f"{index}: {' -> '.join(f'{value:.9g}' for value in values)} ({int(differs.sum())} of {differs.numel()} elements differ)"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
