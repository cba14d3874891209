"""Stage and symptom of every way in which two states can differ on one pair, and what is listed of the bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.bisect.differences import Stage, Symptom, changed_bits, compare, first_difference, margin_class
from harness.bisect.observe import Digest, Observation, digest, unavailable
from harness.verdict import Outcome, Verdict

W13, W2, SCALE = (torch.arange(6.0).reshape(2, 3) + 100 * i for i in range(3))
OUTPUT = torch.ones(2, 2)


def parameters(**tensors: torch.Tensor) -> dict[str, Digest]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def observation(outcome: Outcome = Outcome.PASS, margin: float | None = 0.5, signature: str = "", **fields: object) -> Observation:
    verdict = Verdict(outcome=outcome, claim="c", margin=margin, signature=signature)
    made = Observation(pair="p", verdict=verdict, parameters=parameters(w13=W13, w2=W2), output=digest(OUTPUT), seconds={"load": 1.0})
    return replace(made, **fields)  # type: ignore[arg-type]


PASS = observation()
RAISED = observation(Outcome.LOAD_ERROR, None, "KeyError: 1", parameters={}, output=None)


@pytest.mark.parametrize(
    ("after", "stage", "symptom"),
    [
        (RAISED, Stage.LOAD, Symptom.ERROR),
        (observation(Outcome.RUN_ERROR, None, "IndexError: 1", output=None), Stage.RUN, Symptom.ERROR),
        (observation(Outcome.UNSUPPORTED, None), Stage.LOAD, Symptom.REFUSED),
        (unavailable("p", "no such surface"), Stage.IMPORT, Symptom.UNAVAILABLE),
        (observation(Outcome.MISMATCH, 3.0, "X@1"), Stage.RUN, Symptom.NUMERIC),
        (observation(Outcome.NOT_IDENTICAL, 3.0, "X@1"), Stage.RUN, Symptom.NUMERIC),
        (observation(margin=0.0), Stage.RUN, Symptom.NUMERIC),
        (observation(Outcome.MISMATCH, 3.0, "X@1", parameters=parameters(w13=W13, w2=W2 + 1)), Stage.LOAD, Symptom.NUMERIC),
        (observation(control="changed"), Stage.RUN, Symptom.CONTROL),
        (observation(parameters=parameters(w13=W13.repeat(2, 1), w2=W2)), Stage.LOAD, Symptom.MEMORY),
    ],
)
def test_what_differs_is_placed(after: Observation, stage: Stage, symptom: Symptom) -> None:
    for one, other in ((PASS, after), (after, PASS)):
        difference = compare(one, other)
        assert difference is not None
        assert (difference.stage, difference.symptom) == (stage, symptom)
    assert compare(after, after) is None


def test_another_margin_of_the_same_class_is_no_difference() -> None:
    assert compare(PASS, observation(margin=0.9)) is None
    assert [margin_class(observation(margin=margin)) for margin in (None, 0.0, 1.0, 1.1, 11.0, float("nan"))] == [
        "none", "exact", "inside", "outside", "far outside", "far outside",
    ]  # fmt: skip


def test_speed_and_bits_are_told_on_request_only() -> None:
    slow = observation(seconds={"load": 2.0, "run": 2.0})
    assert compare(PASS, slow) is None
    assert compare(PASS, observation(seconds={"load": 1.2}), speed=True) is None
    difference = compare(PASS, slow, speed=True)
    assert difference is not None
    assert (difference.stage, difference.symptom) == (Stage.RUN, Symptom.SPEED)

    loaded = observation(parameters=parameters(w13=W13, w2=W2 + 1, w2_scale=SCALE[:1, :1]), output=digest(OUTPUT * 2))
    computed = observation(output=digest(OUTPUT * 2))
    for after, stage, listed in ((loaded, Stage.LOAD, "parameters w2, w2_scale and the output"), (computed, Stage.RUN, "the output")):
        assert compare(PASS, after) is None
        difference = compare(PASS, after, bits=True)
        assert difference is not None
        assert (difference.stage, difference.symptom) == (stage, Symptom.BITS)
        assert changed_bits(difference) == listed
    assert compare(PASS, PASS, bits=True, speed=True) is None


@pytest.mark.parametrize(
    ("new", "output", "said"),
    [
        ({"w13": W13, "w2": W2 + 1}, OUTPUT, "loading differs first in parameter w2[0, 0]: 100 -> 101 (6 of 6 elements differ)"),
        ({"w13": W13}, OUTPUT, "loading differs first in parameter w2: there only before"),
        ({"w13": W13, "w2": W2, "x": W2}, OUTPUT, "loading differs first in parameter x: there only after"),
        ({"w13": W13.double(), "w2": W2}, OUTPUT, "loading differs first in parameter w13: float32 [2, 3] -> float64 [2, 3]"),
        (
            {"w13": W13, "w2": W2},
            OUTPUT * torch.tensor([1.0, 3.0]),
            "loading is bit for bit alike; the output differs first at [0, 1]: 1 -> 3 (2 of 4 elements differ)",
        ),
        ({"w13": W13, "w2": W2}, OUTPUT, "loading and output are bit for bit alike"),
    ],
)
def test_the_first_difference_is_in_a_parameter_else_in_the_output(
    new: dict[str, torch.Tensor], output: torch.Tensor, said: str, tmp_path: Path
) -> None:
    torch.save({"parameters": {"w13": W13, "w2": W2}, "output": OUTPUT}, tmp_path / "old")
    torch.save({"parameters": new, "output": output}, tmp_path / "new")
    after = observation(Outcome.MISMATCH, 3.0, "X", parameters=parameters(**new), output=digest(output))
    difference = compare(PASS, after)
    assert difference is not None
    assert first_difference(difference, tmp_path / "old", tmp_path / "new") == said


def test_what_raised_has_no_bits_to_list() -> None:
    difference = compare(PASS, RAISED)
    assert difference is not None
    assert changed_bits(difference) == ""
    assert first_difference(difference, Path("none"), Path("none")) == ""
