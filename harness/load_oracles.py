"""What must hold of every loading, checked on what was seen of it. Pure: tensors in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from cases.case import MoECase
from harness.compare import show
from harness.load_places import EVERY, Place, held, passed_over, places, region, rounded_up, shared, turned
from references.formats import torch_dtype

if TYPE_CHECKING:
    from harness.subject.loading import Loading


class Oracle(StrEnum):
    """Closed. Values are what signatures and the ledger say."""

    UNCONSUMED = "UNCONSUMED"  # a checkpoint tensor that went into no parameter, or into another's
    NO_PLACE = "NO_PLACE"  # the layer has no parameter for it, or none of that shape
    NOT_DECODED = "NOT_DECODED"  # a parameter that does not hold the checkpoint's values, before conversion
    SIZE = "SIZE"  # a parameter with more or fewer elements than the checkpoint's formula
    SENTINEL_LEFT = "SENTINEL_LEFT"  # memory that was never written, or a value made from it
    UNKNOWN_ACCEPTED = "UNKNOWN_ACCEPTED"  # a tensor of an unknown name was taken without a word
    HANDED = "HANDED"  # a converter was given something else than the quantized weights and scales
    LEFT = "LEFT"  # the loaded layer holds something else than the quantized weights and scales
    DEPTHS_DIFFER = "DEPTHS_DIFFER"  # vLLM's own loader left other parameters than the layer's load_weights
    SHARD = "SHARD"  # one rank of a divided layer holds something else than its slice of the checkpoint, loaded as a layer of its own
    SUM = "SUM"  # the ranks' outputs do not add up to the layer's
    PEAK = "PEAK"  # more memory at once than inputs, outputs and one expert's scratch


CLAIMS: dict[Oracle, str] = {
    Oracle.UNCONSUMED: "every checkpoint tensor is consumed, by the parameter of its name",
    Oracle.NO_PLACE: "the layer has a place for every checkpoint tensor",
    Oracle.NOT_DECODED: "each parameter holds the checkpoint's values: gate rows first, up rows after, scales by element",
    Oracle.SIZE: "each parameter has the elements that the checkpoint's tensors have",
    Oracle.SENTINEL_LEFT: "no value depends on memory that was never written",
    Oracle.UNKNOWN_ACCEPTED: "a tensor of an unknown name is refused, and the error names it",
    Oracle.HANDED: "converters are handed exactly the quantized weights and scales",
    Oracle.LEFT: "the loaded layer holds exactly the quantized weights and scales",
    Oracle.DEPTHS_DIFFER: "vLLM's own loader, reading a directory, leaves the parameters of the layer's load_weights, bit for bit",
    Oracle.SHARD: "each rank of a divided layer holds its slice of the checkpoint, bit for bit as if that were a layer of its own",
    Oracle.SUM: "the outputs of all ranks add up to the layer's",
    Oracle.PEAK: "conversion and quantization need their outputs and one expert's scratch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that does not hold. ``what``: the kind of tensor or the converter, for the signature; ``text``: for a reader."""

    oracle: Oracle
    what: str
    text: str
    over: float | None = None  # what was found over what is allowed, where that is a number

    @property
    def signature(self) -> str:
        """Short and stable: no expert, no size."""
        return f"{self.oracle}:{self.what}"


def consumed(case: MoECase, checkpoint: Mapping[str, torch.Tensor], seen: Loading) -> Iterator[Finding]:
    """Every checkpoint tensor went into the parameter of its name."""
    for place in places(checkpoint):
        if passed_over(case, place.kind) or (seen.ended and place.tensor not in seen.consumed):  # the last one sets conversion off
            continue
        names = {name.rpartition(".")[2] for name in seen.consumed.get(place.tensor, ())}
        if names != {place.parameter}:
            into = f"went into {', '.join(sorted(names))}, not {place.parameter}" if names else "went into no parameter"
            yield Finding(oracle=Oracle.UNCONSUMED, what=place.kind, text=f"{place.tensor} {into}")


def decoded(case: MoECase, checkpoint: Mapping[str, torch.Tensor], seen: Loading) -> Iterator[Finding]:
    """Before conversion each parameter holds the checkpoint's values, where they belong, and nothing besides."""
    checkpoint = held(case, checkpoint, seen.quant_method)
    mine = places(checkpoint)
    for place in mine:
        parameter, tensor = seen.before.get(place.parameter), checkpoint[place.tensor]
        if parameter is None:
            yield Finding(oracle=Oracle.NO_PLACE, what=place.kind, text=f"the layer has no parameter {place.parameter} for {place.tensor}")
            continue
        parameter = turned(case, place.kind, parameter, seen.quant_method)
        try:
            there = region(parameter, place, tensor)
        except ValueError as error:
            yield Finding(oracle=Oracle.NO_PLACE, what=place.kind, text=str(error))
            continue
        if place.expert != EVERY and shared(parameter, place):
            both = [checkpoint[other.tensor] for other in mine if (other.parameter, other.expert) == (place.parameter, place.expert)]
            tensor = torch.stack([each.reshape(tensor.shape) for each in both]).amax(0)  # by which neither half's inputs saturate
        if (wrong := differing(tensor, there)) is not None:
            yield Finding(oracle=Oracle.NOT_DECODED, what=place.kind, text=_wrong(place, tensor, there, wrong, checkpoint))
    yield from _sizes(case, checkpoint, mine, seen)


def _sizes(case: MoECase, checkpoint: Mapping[str, torch.Tensor], mine: tuple[Place, ...], seen: Loading) -> Iterator[Finding]:
    if rounded_up(case):
        return
    formula: dict[str, int] = {}
    kinds = {place.parameter: place.kind for place in mine}
    for place in mine:
        parameter = seen.before.get(place.parameter)
        if parameter is not None and not (place.part and shared(parameter, place)):
            formula[place.parameter] = formula.get(place.parameter, 0) + checkpoint[place.tensor].numel()
    for name, elements in formula.items():
        parameter = seen.before[name]
        if parameter.numel() != elements:
            text = f"{name} {list(parameter.shape)} holds {parameter.numel()} elements, the checkpoint's tensors for it {elements}"
            yield Finding(oracle=Oracle.SIZE, what=kinds[name], text=text)


def peak(case: MoECase, seen: Loading, *, requantized: bool = False) -> Iterator[Finding]:
    """Inputs are there already. Beside outputs: for one expert's larger matrix a copy in the checkpoint's dtype, the quotient in fp32 and
    its rounded copy; and for all experts each scale twice, as the largest value and as the scale that is made of it.

    requantized: weights are quantized once more for the kernel, and one expert's are multiplied out by spread scales first, in fp32.
    """
    allocated = seen.allocated
    if allocated is None:
        raise ValueError("the subject did not count what was allocated")
    one = max(case.shape("up_proj")[0] * case.shape("up_proj")[1] * (2 if case.activation.gated else 1), case.hidden * case.intermediate)
    one = one if not rounded_up(case) else _whole_blocks(case)
    scales = sum(4 * tensor.numel() for name, tensor in seen.after.items() if "scale" in name)
    scratch = one * (4 + 4 + torch_dtype(case.dtype).itemsize + (8 if requantized else 0)) + 2 * scales
    allowed = allocated.kept + scratch
    if allocated.peak > allowed:
        text = (
            f"{allocated.peak} bytes at the peak, of which {allocated.kept} stay; with one expert's scratch of {scratch} "
            f"{allowed} are needed; the largest allocation is of {allocated.largest or 'unknown'} bytes"
        )
        yield Finding(oracle=Oracle.PEAK, what="conversion", text=text, over=allocated.peak / allowed)


def _whole_blocks(case: MoECase) -> int:
    """Elements of one expert's larger matrix in whole 128 x 128 blocks."""
    hidden, intermediate = (-(-size // 128) * 128 for size in (case.hidden, case.intermediate))
    return hidden * intermediate * (2 if case.activation.gated else 1)


def differing(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor | None:
    """[...] bool where ``actual`` does not hold ``expected``: bit for bit in one dtype, by value in two. None: nowhere."""
    if expected.dtype == actual.dtype:
        left, right = (_bytes(each) for each in (expected, actual))
        wrong = (left != right).any(-1)
    else:
        wrong = _double(expected) != _double(actual)
    return wrong if bool(wrong.any()) else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[..., size of an element] uint8."""
    flat = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor).double()


def _wrong(place: Place, expected: torch.Tensor, actual: torch.Tensor, wrong: torch.Tensor, checkpoint: Mapping[str, torch.Tensor]) -> str:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    cell = "" if place.expert == EVERY else f"[{place.expert}]"
    where = f"{place.parameter}{cell}, {place.half} (from {place.tensor})"
    same = [other for other, tensor in checkpoint.items() if tensor.shape == actual.shape and differing(tensor, actual) is None]
    hint = f"; these are {same[0]}'s values" if same and expected.numel() > 1 else ""
    first = f"first at {list(index)}: expected {show(expected[index])}, actual {show(actual[index])}"
    return f"{where}: {int(wrong.sum())} of {wrong.numel()} elements differ, {first}{hint}"


def sentinels(first: Loading, second: Loading) -> Iterator[Finding]:
    """Two loadings of one checkpoint over memory that held different sentinels leave the same parameters, and no NaN."""
    for name, parameter in first.after.items():
        other = second.after.get(name)
        if other is None or other.shape != parameter.shape:
            text = f"{name} {list(parameter.shape)} is {'absent' if other is None else list(other.shape)} when loaded again"
            yield Finding(oracle=Oracle.SENTINEL_LEFT, what=name, text=text)
            continue
        values = _double(parameter)
        left = torch.isnan(values) | torch.isnan(_double(other))
        if (wrong := differing(parameter, other)) is not None:
            left |= wrong
        if bool(left.any()):
            index = tuple(int(i) for i in left.nonzero()[0])
            text = (
                f"{name} {list(parameter.shape)}: {int(left.sum())} elements hold what memory held before loading, first at {list(index)}"
            )
            yield Finding(oracle=Oracle.SENTINEL_LEFT, what=name, text=text)


def same(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], what: str) -> Iterator[Finding]:
    """Two depths of loading left the same parameters. ``what``: the other depth."""
    for name in sorted(set(expected) ^ set(actual)):
        text = f"{name} is a parameter of {'layer depth' if name in expected else what} only"
        yield Finding(oracle=Oracle.DEPTHS_DIFFER, what=what, text=text)
    for name in expected:
        if name not in actual:
            continue
        left, right = expected[name], actual[name]
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            text = f"{name}: {list(left.shape)} {left.dtype} at layer depth, {list(right.shape)} {right.dtype} at {what}"
        elif (wrong := differing(left, right)) is not None:
            index = tuple(int(i) for i in wrong.nonzero()[0])
            text = (
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {list(index)}: "
                f"{show(left[index])} at layer depth, {show(right[index])} at {what}"
            )
        else:
            continue
        yield Finding(oracle=Oracle.DEPTHS_DIFFER, what=what, text=text)
