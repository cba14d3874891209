"""Asking a subject for one exact relation of one pair, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from harness import expected, judge, relations_formats, relations_rows, relations_scales
from harness.backends import declared_refusal, experts_expected
from harness.explained import no_interval
from harness.faults import Fault, applicable
from harness.flat import flat_elements, memory_scales
from harness.inject import Inputs, contributions, separable
from harness.pipeline import PairResult
from harness.relations import CLAIMS, Relation
from harness.relations_check import Broken, Setting, Variant, check
from harness.subject import LoadFailed, RunFailed, SubjectError, TakesViews
from harness.verdict import NOT_FINITE, Outcome, Verdict
from references.enclosure import enclose
from references.formats import round_to
from references.loading import load
from references.moe import forward

if TYPE_CHECKING:
    from cases.case import Entry, MoECase
    from harness.backends import Backend
    from harness.pairs import Pair
    from harness.subject import Loaded, Subject

BUILDERS: dict[Relation, Callable[[Setting], Iterator[Variant]]] = {
    Relation.REFERENCE: relations_rows.reference,
    Relation.REPEATED: relations_rows.repeated,
    Relation.UNROUTED_SCALE: relations_scales.unrouted_scale,
    Relation.DOWN_DOUBLES: relations_scales.down_doubles,
    Relation.DOWN_SCALE: relations_scales.down_scale,
    Relation.UP_MULTIPLIES: relations_scales.up_multiplies,
    Relation.UP_SCALE: relations_scales.up_scale,
    Relation.GATE_SCALE: relations_scales.gate_scale,
    Relation.INPUT_SCALE: relations_scales.input_scale,
    Relation.PERMUTED_EXPERTS: relations_rows.permuted_experts,
    Relation.PERMUTED_TOKENS: relations_rows.permuted_tokens,
    Relation.DROPPED_TOKENS: relations_rows.dropped_tokens,
    Relation.MULTIPLIED_TOKENS: relations_rows.multiplied_tokens,
    Relation.OTHER_FORMAT: relations_formats.other_format,
    Relation.ONLINE_AS_PREQUANTIZED: relations_formats.online_as_prequantized,
    Relation.WEIGHT_ON_INPUT: relations_formats.weight_on_input,
    Relation.SCALE_VIEWS: relations_formats.scale_views,
}

STRIDES_IGNORED = "W_SCALE_STRIDES_IGNORED"  # expert e is scaled by memory element e of a scale tensor that is not laid out that way
_REASONED = ("ValueError", "AssertionError", "NotImplementedError", "RuntimeError")  # with a text of its own


@dataclass(slots=True)
class Drive:
    """A subject that loads a setting once, however many relations start from it. Holds the last one."""

    subject: Subject
    _setting: Setting | None = None
    _started: tuple[Loaded, torch.Tensor] | None = None
    refused: list[str] = field(default_factory=list)  # views that were refused with a reason, since the last verdict

    def setting(self, case: MoECase, entry: Entry, backend: Backend) -> Setting:
        """The pair's layer and batch; the same object while it is asked for the same pair."""
        held = self._setting
        if held is None or (held.case, held.entry, held.backend) != (case, entry, backend):
            return Setting.of(case, entry, backend)
        return held

    def forget(self) -> None:
        """Let go of the layer that is held."""
        self._setting = self._started = None

    def start(self, setting: Setting) -> tuple[Loaded, torch.Tensor]:
        """The loaded layer and its output [M, H]. Raises SubjectError."""
        if self._setting is not setting or self._started is None:
            loaded = self._load(setting, Variant(change="", setting=setting))
            self._setting, self._started = setting, (loaded, self._run(loaded, setting))
        return self._started

    def before(self, variant: Variant, setting: Setting) -> torch.Tensor:
        """What the variant is compared with. Raises SubjectError."""
        if variant.start is None and not variant.start_views:
            return self.start(setting)[1]
        start = variant.start or setting
        return self._run(self._load(start, Variant(change="", setting=start, views=variant.start_views)), start)

    def after(self, variant: Variant, setting: Setting) -> torch.Tensor:
        """What became of it. Raises SubjectError."""
        if variant.between is not None:
            self._run(self._load(variant.between, Variant(change="", setting=variant.between)), variant.between)
        loaded = self.start(setting)[0] if variant.reuse else self._load(variant.setting, variant)
        return self._run(loaded, variant.setting)

    def _load(self, setting: Setting, variant: Variant) -> Loaded:
        if variant.views and isinstance(self.subject, TakesViews):
            return self.subject.load_viewed(setting.case, setting.checkpoint, variant.views)
        return self.subject.load(setting.case, setting.entry, setting.checkpoint)

    def _run(self, loaded: Loaded, setting: Setting) -> torch.Tensor:
        ran = self.subject.run(loaded, setting.batch)
        if ran.experts_class not in (wanted := experts_expected(setting.case, setting.entry, setting.backend)):
            raise RunFailed(f"{ran.experts_class} ran where {' or '.join(sorted(wanted))} was forced")
        return ran.output


def examine(relation: Relation, setting: Setting, drive: Drive) -> tuple[tuple[Broken, Variant, torch.Tensor], ...]:
    """Every variant of the relation that broke it, with the output that did.

    Raises:
        SubjectError: the subject raised where it may not refuse.
        LookupError: the relation changes nothing of this pair, so it would hold whatever came.
    """
    found = []
    variants = list(BUILDERS[relation](setting))
    if not variants:
        raise LookupError(f"relation {relation} has nothing to change in {setting.case.id}: say so in harness/relations.py")
    for variant in variants:
        try:
            before = drive.before(variant, setting)
            after = drive.after(variant, setting)
        except SubjectError as error:
            if variant.may_refuse and reasoned(error):
                drive.refused.append(f"{variant.change}: {error.detail}")
                continue
            raise
        if (broken := check(relation, variant, before, after)) is not None:
            found.append((broken, variant, after))
    return tuple(found)


def verdict(relation: Relation, setting: Setting, drive: Drive) -> Verdict:
    """PASS, NOT_IDENTICAL with what broke, or what vLLM raised."""
    drive.refused.clear()
    try:
        found = examine(relation, setting, drive)
    except SubjectError as error:
        outcome = Outcome.LOAD_ERROR if isinstance(error, LoadFailed) else Outcome.RUN_ERROR
        refusal = declared_refusal(setting.case, setting.entry, setting.backend)
        if refusal is not None and error.refused and refusal.matches(error.detail):
            return judge.refused(refusal, error.detail)
        return judge.raised(outcome, error.detail)
    if not found:
        return Verdict(outcome=Outcome.PASS, claim=CLAIMS[relation], margin=0.0, detail="\n".join(drive.refused))
    broken, variant, _ = found[0]
    causes = [identify(each, output) or "UNEXPLAINED" for _, each, output in found]
    repeated = relation is Relation.REPEATED
    details = [str(each) for each, _, _ in found]
    if "_SCALE_FLAT_INDEX" in causes[0] and len(broken.index) == 2:
        details[0] += "\n" + flat_elements(variant.setting, causes[0], broken.index)
    return Verdict(
        outcome=Outcome.NONDETERMINISTIC if repeated else Outcome.NOT_IDENTICAL,
        claim=f"{CLAIMS[relation]}; {len(found)} of its changes do otherwise",
        pattern=f"predicted: {broken.predicted}; moved: {broken.moved}",
        spread={"elements": [broken.differing, broken.of]},
        detail="\n".join(details),
        signature=Outcome.NONDETERMINISTIC.value if repeated else "+".join(sorted(set(causes))),
    )


def identify(variant: Variant, actual: torch.Tensor) -> str:
    """The first fault of faults.py that predicts every element of ``actual``, as a signature; "" when none does.

    A fault can lead out of the lattice: then every element lies in the interval of the faulty recipe, where it has one.
    """
    setting = variant.setting
    how, inputs = setting.recipe, inputs_of(setting)
    values = actual.to(torch.float64)
    if not bool(torch.isfinite(values).any()):
        return NOT_FINITE
    if variant.views:
        seen = replace(inputs, loaded=memory_scales(setting, variant.views))
        return STRIDES_IGNORED if bool(_inside(seen, values).all()) else ""
    for fault in Fault:
        if applicable(fault, setting.case, how) and _predicts(fault, inputs, values):
            return f"{fault.name}@all" if separable(fault) else fault.name
    return ""


def inputs_of(setting: Setting) -> Inputs:
    """What faults are put into."""
    stored = expected.experts(setting.case, setting.checkpoint)
    return Inputs(
        experts=stored,
        loaded=load(stored, setting.recipe),
        hidden_states=setting.batch.hidden_states,
        router_logits=setting.batch.router_logits,
        routing=setting.routing,
        renormalize=setting.case.renormalize,
        activation=setting.case.activation,
        recipe=setting.recipe,
    )


def evaluate(inputs: Inputs) -> torch.Tensor:
    """Contributions [M, k, H] float64 of the reference."""
    return forward(inputs.loaded, inputs.hidden_states, inputs.routing, inputs.activation, inputs.recipe)


def _predicts(fault: Fault, inputs: Inputs, actual: torch.Tensor) -> bool:
    seen: list[Inputs] = []

    def spy(changed: Inputs) -> torch.Tensor:
        seen.append(changed)
        return evaluate(changed)

    output = round_to(contributions(fault, inputs, spy).sum(1), inputs.recipe.output)
    predicted = (output == actual) | _overflowed(output, actual)
    if bool(predicted.all()):
        return True
    if no_interval(fault, inputs) is not None:
        return False
    return bool((predicted | _inside(seen[-1], actual)).all())


def _inside(inputs: Inputs, actual: torch.Tensor) -> torch.Tensor:
    """Which elements [M, H] are honest results of ``inputs``."""
    bounds = enclose(inputs.loaded, inputs.hidden_states, inputs.routing, inputs.activation, inputs.recipe)
    low, high = (round_to(end, inputs.recipe.output) for end in (bounds.low, bounds.high))
    return (low <= actual) & (actual <= high) | _overflowed(low + high, actual)


def _overflowed(predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Both are infinite or NaN; which of the two is a matter of the order of sums."""
    return ~torch.isfinite(predicted) & ~torch.isfinite(actual)


def reasoned(error: SubjectError) -> bool:
    """Whether the subject said why it raised."""
    kind, _, text = error.detail.partition(":")
    return kind in _REASONED and bool(text.strip())


def run_relation(relation: Relation, pair: Pair, backend: Backend, drive: Drive) -> PairResult:
    """One relation of one pair, as harness/pipeline.py runs a pair. What vLLM raises becomes an outcome; what we get wrong propagates."""
    began = time.perf_counter()
    setting = drive.setting(pair.case, pair.entry, backend)
    result = verdict(relation, setting, drive)
    return PairResult(verdict=result, timings={"relation": time.perf_counter() - began}, extras={"recipe": setting.recipe.name})
