"""One process that loads cases for Humming on the interpreter platform and prints what the oracles find, one JSON line a case.

``python -m harness.subject.tests.humming_child PLANT:CASE...``; the architecture is asked for by ``MOEDIFF_ARCHITECTURE``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from cases.case import MoECase
from cases.checkpoint import make_checkpoint
from harness import load_humming, load_views
from harness.backends import Backend
from harness.subject import LoadFailed
from harness.subject.vllm_layer import VllmSubject
from references.vocabulary import Layout


@contextmanager
def nothing() -> Iterator[None]:
    """As installed."""
    yield


@contextmanager
def scale_of_another_expert() -> Iterator[None]:
    """The state that the conversion reads holds the first expert's scales for the last as well."""
    import vllm.model_executor.layers.quantization.utils.humming.moe as moe

    extract = moe._extract_sublayer_tensors

    def planted(layer: Any, sublayer: str) -> dict[str, torch.Tensor]:
        for tensor in (layer.state_dict().get(f"{sublayer}_{name}") for name in ("weight_scale", "weight_scale_inv")):
            if tensor is not None:
                tensor.view(torch.uint8)[-1] = tensor.view(torch.uint8)[0]
        return extract(layer, sublayer)

    with mock.patch.object(moe, "_extract_sublayer_tensors", planted):
        yield


@contextmanager
def scales_outside_the_state() -> Iterator[None]:
    """The founding fault (vllm#56606): quantized scales that are no part of the layer's state, so that the conversion misses them."""
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as oracle

    replace = oracle.replace_parameter

    def planted(layer: Any, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("weight_scale"):
            layer._parameters.pop(name, None)
            object.__setattr__(layer, name, tensor)
        else:
            replace(layer, name, tensor)

    with mock.patch.object(oracle, "replace_parameter", planted):
        yield


@contextmanager
def one_bit_in_the_layout() -> Iterator[None]:
    """The last step, into the GEMM's own layout, turns one bit of one weight."""
    import humming.transform as transform

    repack = transform.ops.repack_weight

    def planted(**arguments: Any) -> torch.Tensor:
        words = repack(**arguments)
        words[-1, 0, 0] ^= 1
        return words

    with mock.patch.object(transform.ops, "repack_weight", planted):
        yield


@contextmanager
def registered() -> Iterator[None]:
    """The repair of the fault alive in 0.33.0: online MXFP4 hands the conversion a layer whose state holds what was quantized."""
    import vllm.model_executor.layers.quantization.online.mxfp4 as online

    convert = online.convert_weight_to_mxfp4_moe_kernel_format

    def repaired(*, layer: Any, **arguments: Any) -> Any:
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
            online.replace_parameter(layer, name, arguments[name])
        return convert(layer=layer, **arguments)

    with mock.patch.object(online, "convert_weight_to_mxfp4_moe_kernel_format", repaired):
        yield


PLANTS = {
    plant.__name__: plant for plant in (nothing, scale_of_another_expert, scales_outside_the_state, one_bit_in_the_layout, registered)
}


def told(subject: VllmSubject, case: MoECase) -> dict[str, object]:
    """Error, findings and converters of one loading."""
    checkpoint = make_checkpoint(case)
    try:
        seen = subject.watch_loading(case, checkpoint, sentinel=0x7F)
    except LoadFailed as error:
        return {"error": error.detail, "findings": [], "converters": []}
    experts = load_humming.quantized(case, checkpoint)
    grouped = case.weight_scale is Layout.GROUP32
    views = load_humming.handed(case, experts, seen) if grouped else load_views.converted(case, experts, seen, Backend.HUMMING)
    found = [*views, *load_humming.left(case, experts, seen)]
    converters = [handed.converter for handed in seen.handed]
    return {"error": "", "findings": [f"{each.signature} {each.text}" for each in found], "converters": converters}


def main(*asked: str) -> None:
    """Prints."""
    subject = VllmSubject("humming", device="cpu", interpreter=True)
    for each in asked:
        plant, _, text = each.partition(":")
        with PLANTS[plant]():
            sys.stdout.write(json.dumps({"asked": each, **told(subject, MoECase.from_id(text))}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
