from __future__ import annotations

import pytest

from harness.architectures import ARCHITECTURES, VARIABLE, parse, requested
from harness.backends import SPECS, Backend
from harness.exits import Misuse


def test_the_names_are_those_of_the_lanes() -> None:
    asked = {name for backend in Backend for name in SPECS[backend].architectures if name.startswith("sm")}
    assert asked == set(ARCHITECTURES)
    assert [f"sm{each.number}" for each in ARCHITECTURES.values()] == list(ARCHITECTURES)


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(Misuse, match="unknown architecture 'sm99'; the interpreter platform answers as sm80, sm89, sm90, sm100, sm120"):
        parse("sm99")


def test_the_environment_asks() -> None:
    assert requested({}) is None
    assert requested({VARIABLE: ""}) is None
    assert requested({VARIABLE: "sm100"}) is ARCHITECTURES["sm100"]
    with pytest.raises(Misuse):
        requested({VARIABLE: "hopper"})
