"""A subject without vLLM: an honest kernel, with a named fault put into it on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cases.batch import Batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from harness.backends import Backend, declared_refusal, experts_expected
from harness.expected import experts, routing
from harness.faults import Fault
from harness.inject import Inputs, contributions
from harness.recipes import recipe
from harness.subject import Loaded, LoadFailed, Ran
from harness.subject import fake_kernel as kernel
from references.formats import torch_dtype
from references.loading import LoadedExpert
from references.moe import Expert
from references.vocabulary import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    case: MoECase
    recipe: Recipe
    stored: tuple[Expert, ...]
    loaded: tuple[LoadedExpert, ...]
    experts_class: str


class FakeSubject:
    """Claims to be whatever should have run. ``fault`` None: every result is honest."""

    def __init__(self, fault: Fault | None = None, backend: Backend = Backend.INTERPRETER) -> None:
        """``backend`` decides the recipe, as it does for the real subject."""
        self._fault, self._backend = fault, backend
        self.name = "fake" if fault is None else f"fake with {fault.name}"

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """Never fails."""
        return self.load_experts(case, entry, experts(case, checkpoint), recipe(case, entry, self._backend))

    def load_experts(self, case: MoECase, entry: Entry, stored: tuple[Expert, ...], how: Recipe) -> Loaded:
        """These experts, whatever file they came from; the case says how tokens are routed to them."""
        ran = sorted(experts_expected(case, entry, self._backend))[0]
        layer = _Layer(case=case, recipe=how, stored=stored, loaded=kernel.load(stored, how), experts_class=ran)
        return Loaded(handle=layer, quant_method="fake", experts_class=ran)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """One forward; a fault that does not apply to the case raises ValueError."""
        layer = loaded.handle
        assert isinstance(layer, _Layer)
        case, how = layer.case, layer.recipe
        if how.router_weight_exact:
            routed = routing(case, batch, given=True)
        else:
            routed = kernel.route(batch.router_logits, case.top_k, case.renormalize)
        inputs = Inputs(
            experts=layer.stored,
            loaded=layer.loaded,
            hidden_states=batch.hidden_states,
            router_logits=batch.router_logits,
            routing=routed,
            renormalize=case.renormalize,
            activation=case.activation,
            recipe=how,
        )
        given = contributions(self._fault, inputs, evaluate)
        dtypes = tuple(str(torch_dtype(how.output if a is None else a.format)).removeprefix("torch.") for a in (how.a1, how.a2))
        return Ran(output=kernel.combine(given, how), experts_class=layer.experts_class, gemm_dtypes=dtypes)


class RefusingFake(FakeSubject):
    """The fake of a whole lane: it refuses what the lane declares that vLLM refuses."""

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """Raises LoadFailed where a refusal is declared, with the declared pattern for vLLM's words."""
        refusal = declared_refusal(case, entry, self._backend)
        if refusal is not None:
            raise LoadFailed(refusal.says, refused=True)
        return super().load(case, entry, checkpoint)


def evaluate(inputs: Inputs) -> torch.Tensor:
    """Contributions [M, k, H] float32 by the fake's own kernel."""
    return kernel.forward(inputs.loaded, inputs.hidden_states, inputs.routing, inputs.activation, inputs.recipe)
