from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from cases.batch import Batch
from cases.case import Entry, Level, MoECase, Origin
from cases.checkpoint import Checkpoint
from cases.lattice_pairs import lattice_pairs
from harness.backends import Backend
from harness.exact import BUILDERS, STRIDES_IGNORED, Drive, evaluate, identify, verdict
from harness.expected import experts
from harness.flat import memory_scales
from harness.inject import Inputs
from harness.relations import Relation, asked
from harness.relations_check import Setting
from harness.subject import Loaded, LoadFailed, Ran, RunFailed
from harness.subject.fake import FakeSubject
from harness.subject.views import Shape, Strides, View, view
from harness.verdict import Outcome
from references.formats import round_to, torch_dtype
from references.loading import load

LANE = Backend.INTERPRETER
TENSOR = "int8-tensor-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice"
CHANNEL = "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice"


def setting(text: str) -> Setting:
    return Setting.of(MoECase.from_id(text), Entry.FUSED_EXPERTS, LANE)


class IgnoresStrides(FakeSubject):
    """Scales expert e by element e from the start of the memory of the scale tensors that it is handed."""

    def load_viewed(self, case: MoECase, checkpoint: Checkpoint, views: Mapping[str, View]) -> Loaded:
        loaded = self.load(case, Entry.FUSED_EXPERTS, checkpoint)
        return Loaded(handle=views, quant_method="fake", experts_class=loaded.experts_class)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        start = setting(TENSOR)
        assert isinstance(loaded.handle, dict)
        stored = experts(start.case, start.checkpoint)
        inputs = Inputs(
            experts=stored,
            loaded=memory_scales(start, loaded.handle) if loaded.handle else load(stored, start.recipe),
            hidden_states=batch.hidden_states,
            router_logits=batch.router_logits,
            routing=start.routing,
            renormalize=True,
            activation=start.case.activation,
            recipe=start.recipe,
        )
        output = round_to(evaluate(inputs).sum(1), start.recipe.output).to(torch_dtype(start.recipe.output))
        return Ran(output=output, experts_class=loaded.experts_class, gemm_dtypes=())

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        loaded = super().load(case, entry, checkpoint)
        return Loaded(handle={}, quant_method="fake", experts_class=loaded.experts_class)


class Refuses(FakeSubject):
    """Every form but its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def load_viewed(self, case: MoECase, checkpoint: Checkpoint, views: Mapping[str, View]) -> Loaded:
        raise self.error


def test_every_form_the_issue_names_is_handed_over_for_weights_and_activations() -> None:
    tensor = {
        (name, how.shape, how.strides) for each in BUILDERS[Relation.SCALE_VIEWS](setting(TENSOR)) for name, how in each.views.items()
    }
    channel = {
        (name, how.shape, how.strides) for each in BUILDERS[Relation.SCALE_VIEWS](setting(CHANNEL)) for name, how in each.views.items()
    }
    one_each, along = (Shape.E, Shape.E_1, Shape.E_1_1), (Shape.E_N, Shape.E_N_1)
    plain, all_strides = (Strides.CONTIGUOUS, Strides.SECOND, Strides.EXPANDED), tuple(Strides)
    weights = {*product(one_each, plain), *product(along, all_strides)} - {(Shape.E, Strides.CONTIGUOUS)}  # which they are compared with
    inputs = {*product((Shape.SCALAR, Shape.ONE, Shape.ONE_ONE, *one_each), plain)} - {(Shape.ONE, Strides.CONTIGUOUS)}
    assert tensor == {(name, *how) for name in ("w1_scale", "w2_scale") for how in weights} | {
        (name, *how) for name in ("a1_scale", "a2_scale") for how in inputs
    }
    of_channels = {*product(along, all_strides)} - {(Shape.E_N_1, Strides.CONTIGUOUS)}
    assert channel == {(name, *how) for name in ("w1_scale", "w2_scale") for how in of_channels}


def test_every_format_and_pairing_of_layouts_is_asked() -> None:
    direct = [case for case, entry in lattice_pairs(Level.SMOKE) if entry is Entry.FUSED_EXPERTS and case.origin is Origin.PREQUANTIZED]
    tried = [case for case in direct if Relation.SCALE_VIEWS in asked(case, Entry.FUSED_EXPERTS, LANE)]
    assert {(c.weight, c.weight_scale, c.act_scale) for c in direct} == {(c.weight, c.weight_scale, c.act_scale) for c in tried}


@pytest.mark.parametrize("shape", [Shape.E_N, Shape.E_N_1])
@pytest.mark.parametrize("strides", list(Strides))
def test_a_form_holds_the_numbers_of_its_start_with_the_strides_it_says(shape: Shape, strides: Strides) -> None:
    scale = torch.exp2(torch.arange(12.0)).view(3, 4, 1)
    how = View(shape, strides)
    given, start = view(scale, how, 4), view(scale, how.start, 4)
    assert torch.equal(given, start)
    assert given.shape == start.shape == ((3, 4) if shape is Shape.E_N else (3, 4, 1))
    assert start.is_contiguous()
    wanted = {
        Strides.CONTIGUOUS: (4, 1),
        Strides.SECOND: (8, 2),
        Strides.TRANSPOSED: (1, 3),
        Strides.ALONG_N: (1, 0),
        Strides.EXPANDED: (0, 0),
    }
    assert given.stride()[:2] == wanted[strides]
    if strides in (Strides.CONTIGUOUS, Strides.SECOND, Strides.TRANSPOSED):
        assert torch.equal(given.flatten(), scale.flatten())


def test_strides_that_are_ignored_are_found_and_named() -> None:
    found = verdict(Relation.SCALE_VIEWS, setting(TENSOR), Drive(IgnoresStrides()))
    assert found.outcome is Outcome.NOT_IDENTICAL
    assert found.signature == STRIDES_IGNORED
    changes = [line for line in found.detail.splitlines() if line.startswith("scale_views: ")]
    assert any("w2_scale handed over as [E, 1], every second element of a buffer" in line for line in changes)
    assert not any("[E, 1], contiguous" in line or "expanded along N" in line for line in changes)
    assert not any("a1_scale" in line for line in changes)


def test_strides_that_are_ignored_with_a_second_fault_are_not_named() -> None:
    start, drive = setting(TENSOR), Drive(IgnoresStrides())
    variant = next(each for each in BUILDERS[Relation.SCALE_VIEWS](start) if "every second element" in each.change)
    output = drive.after(variant, start)
    assert identify(variant, output) == STRIDES_IGNORED
    output[0, 0] = 2 * output[0, 0] + 1
    assert identify(variant, output) == ""


def test_a_refusal_needs_a_reason() -> None:
    refused = verdict(Relation.SCALE_VIEWS, setting(TENSOR), Drive(Refuses(RunFailed("RuntimeError: scale.numel() is 4"))))
    assert refused.outcome is Outcome.PASS
    assert "a2_scale handed over as [E, 1], contiguous: RuntimeError: scale.numel() is 4" in refused.detail
    for error in (RunFailed("AssertionError: "), LoadFailed("IndexError: out of range"), RunFailed("KeyError: 'E'")):
        assert verdict(Relation.SCALE_VIEWS, setting(TENSOR), Drive(Refuses(error))).outcome in (Outcome.RUN_ERROR, Outcome.LOAD_ERROR)
