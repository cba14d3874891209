"""A vLLM that is missing or unfamiliar ends in one sentence, not in a traceback from its depths."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from harness.subject import SubjectUnavailable, vllm_compat
from references.vocabulary import Swiglu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def probe() -> Iterator[None]:
    """The cached surface is put aside."""
    vllm_compat.probe_surface.cache_clear()
    yield
    vllm_compat.probe_surface.cache_clear()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: None) -> SimpleNamespace:
    """A package called vllm with everything the subject looks for; tests take something away."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9'")
    arguments = ", ".join(vllm_compat.LAYER_ARGUMENTS)
    (tmp_path / "vllm" / "all.py").write_text(f"def factory({arguments}): ...\nanything = object()\n")
    places = {what: ("vllm.all:factory" if what == "layer factory" else "vllm.all:anything",) for what in vllm_compat.PLACES}
    monkeypatch.setattr(vllm_compat, "PLACES", places)
    monkeypatch.syspath_prepend(tmp_path)
    yield SimpleNamespace(places=places, folder=tmp_path / "vllm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_no_vllm(monkeypatch: pytest.MonkeyPatch, probe: None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SubjectUnavailable, match=r"^vllm is not installed .* install vllm, or run `tox run -e interpreter`$"):
        vllm_compat.probe_surface()


def test_a_familiar_surface(stand_in: SimpleNamespace) -> None:
    surface = vllm_compat.probe_surface()
    assert (surface.version, surface.package) == ("9.9", stand_in.folder)
    assert "fused_experts" in surface
    assert "online config" not in surface


def test_a_name_that_moved_is_found_at_its_older_place(stand_in: SimpleNamespace) -> None:
    stand_in.places["fused_experts"] = ("vllm.new.place:fused", "vllm.all:renamed", "vllm.all:anything")
    assert "fused_experts" in vllm_compat.probe_surface()


def test_a_name_that_is_gone_is_named_with_its_places(stand_in: SimpleNamespace) -> None:
    stand_in.places["fused_experts"] = ("vllm.new.place:fused", "vllm.all:renamed")
    with pytest.raises(SubjectUnavailable, match=r"surface of vllm 9.9 is not recognised: no fused_experts at vllm.new.place:fused or "):
        vllm_compat.probe_surface()


def test_a_factory_that_takes_other_arguments(stand_in: SimpleNamespace) -> None:
    (stand_in.folder / "all.py").write_text("def factory(num_experts, top_k, hidden_size, prefix, activation): ...\nanything = object()")
    with pytest.raises(SubjectUnavailable, match=r"factory takes no intermediate_size, quant_config; use a vllm release"):
        vllm_compat.probe_surface()


def test_a_vllm_that_cannot_be_imported(stand_in: SimpleNamespace) -> None:
    (stand_in.folder / "all.py").write_text("import a_package_that_is_not_there")
    with pytest.raises(SubjectUnavailable, match=r"installed but cannot be imported: .*a_package_that_is_not_there"):
        vllm_compat.probe_surface()


def test_optional_arguments_are_passed_where_taken() -> None:
    assert vllm_compat.call(lambda a, b=2: (a, b), {"a": 1}, {"b": 3, "c": 4}) == (1, 3)


PLAIN = {"experts": 2, "top_k": 1, "hidden": 8, "intermediate": 8, "dtype": None, "quantization": None, "prefix": ""}
USUAL = {"renormalize": True, "bias": False, "router_weight_on_input": False, "activation": "silu"}


@pytest.mark.parametrize(
    ("asked", "lacking"),
    [
        ({"renormalize": False}, "renormalize"),
        ({"bias": True, "router_weight_on_input": True}, "has_bias, apply_router_weight_on_input"),
        ({"swiglu": Swiglu(limit=7.0)}, "swiglu_limit"),
    ],
)
def test_a_layer_that_cannot_be_told_what_a_case_asks_is_not_built(
    stand_in: SimpleNamespace, asked: dict[str, object], lacking: str
) -> None:
    assert vllm_compat.make_layer(**PLAIN, **USUAL) is None  # type: ignore[arg-type]
    with pytest.raises(SubjectUnavailable, match=f"^factory of vllm 9.9 takes no {lacking}; leave out this case$"):
        vllm_compat.make_layer(**PLAIN, **(USUAL | asked))  # type: ignore[arg-type]


@pytest.mark.vllm
def test_the_installed_surface_is_whole(interpreter: None) -> None:
    surface = vllm_compat.probe_surface()
    assert set(vllm_compat.PLACES) <= set(surface.found)
    assert (surface.package / "__init__.py").exists()
