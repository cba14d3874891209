"""Of Humming's ranges of batch sizes the one that runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness.subject import humming_intervals
from harness.subject.humming_intervals import compile_what_runs, narrowed

RANGES = [[0, 16, {"block": 16}], [16, 64, {"block": 64}], [64, 2**30, {"block": 128}]]


@pytest.mark.parametrize(("size", "which"), [(1, 0), (16, 0), (17, 1), (64, 1), (65, 2)])
def test_the_range_of_the_batch_is_kept_and_holds_size_1(size: int, which: int) -> None:
    _, upper, config = RANGES[which]
    assert json.loads(narrowed(json.dumps(RANGES), size)) == [[0, upper, config]]


def test_outside_of_every_range_all_are_kept() -> None:
    assert json.loads(narrowed(json.dumps(RANGES), 0)) == RANGES


def test_every_class_that_prepares_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts:
        def prepare_humming_moe_kwargs(self, size: int) -> tuple[dict[str, object], None]:
            return {"tuning_config": json.dumps(RANGES), "valid_shape_m": size}, None

    module = ModuleType("stand_in_for_vllms")
    module.Experts = Experts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(humming_intervals, "_MODULE", module.__name__)
    compile_what_runs()
    once = Experts.prepare_humming_moe_kwargs
    compile_what_runs()
    assert Experts.prepare_humming_moe_kwargs is once
    prepared, nothing = Experts().prepare_humming_moe_kwargs(20)
    assert json.loads(str(prepared["tuning_config"])) == [[0, 64, {"block": 64}]]
    assert nothing is None


def test_a_vllm_without_these_experts_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(humming_intervals, "_MODULE", "no_such_package.experts")
    compile_what_runs()
    (tmp_path / "lacks_something.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(humming_intervals, "_MODULE", "lacks_something")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        compile_what_runs()
