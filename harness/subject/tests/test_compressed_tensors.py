"""What cases write, byte for byte what the compressed-tensors package's own compressors write; and its decompressors read the reference's
values. Here, because the package comes with vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cases import packed
from cases.case import MoECase
from cases.checkpoint import make_checkpoint
from cases.configs import quantization_config
from cases.dense import dense_experts
from references.formats import decode, round_to
from references.moe import Projection
from references.scales import over_columns
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

pytestmark = pytest.mark.usefixtures("interpreter")  # the package imports triton, which the lane must find not yet imported

SCHEMES = [(weight, layout, act) for (weight, layout, act), files in packed.SCHEMES.items() if CheckpointFormat.COMPRESSED_TENSORS in files]
NOT_THE_WEIGHTS = {"input_global_scale"}


def case_of(scheme: tuple[str, str, str]) -> MoECase:
    return MoECase.from_id("-".join(scheme) + "-ct-silu-bf16-e1k1m3h256i256-balanced")


def values(projection: Projection) -> torch.Tensor:
    """[N, K] float64."""
    codes = decode(projection.codes, projection.format)
    assert projection.scale is not None
    width = projection.layout.width or codes.shape[1]
    if projection.zero_point is not None:
        codes = codes - over_columns(projection.zero_point.double(), width, codes.shape[1])
    scale = projection.scale.double() * (1.0 if projection.global_scale is None else projection.global_scale.double())
    return codes * over_columns(scale, width, codes.shape[1])


def compressor(case: MoECase) -> tuple[type[BaseCompressor], QuantizationScheme]:
    config = quantization_config(case)
    assert config is not None
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    return BaseCompressor.get_value_from_registry(config["format"]), scheme


def own_state(case: MoECase, projection: Projection) -> dict[str, torch.Tensor]:
    """What the package is handed before it compresses."""
    assert projection.scale is not None
    state = {"weight": values(projection).float(), "weight_scale": projection.scale.clone()}
    if case.weight in packed.INTEGERS:
        state["weight_scale"] = projection.scale.to(torch.bfloat16)
    if projection.zero_point is not None:
        middle = 8 if case.weight is Format.UINT4 else 128
        state["weight_zero_point"] = (projection.zero_point.to(torch.int16) - middle).to(torch.int8)
    if projection.global_scale is not None:
        state["weight_global_scale"] = (1.0 / projection.global_scale).reshape(1)
    return state


def check(case: MoECase, tensors: dict[str, torch.Tensor]) -> None:
    kind, scheme = compressor(case)
    for index, expert in enumerate(dense_experts(case)):
        for name, projection in (("gate_proj", expert.gate), ("down_proj", expert.down)):
            assert projection is not None
            theirs = kind.compress(own_state(case, projection), scheme)
            ours = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{index}.{name}.")}
            assert theirs.keys() - NOT_THE_WEIGHTS == ours.keys() - NOT_THE_WEIGHTS
            for what in theirs.keys() - NOT_THE_WEIGHTS:
                left, right = ours[what], theirs[what]
                assert (left.dtype, left.shape) == (right.dtype, right.shape), what
                # -0 of E2M1 is +0 after a product and a division
                if case.weight is Format.E2M1 and what == "weight_packed":
                    assert torch.equal(without_negative_zeros(left), without_negative_zeros(right)), what
                else:
                    assert torch.equal(as_bytes(left), as_bytes(right)), what


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().contiguous().view(torch.uint8)


def without_negative_zeros(packed_codes: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((packed_codes & 0xF, packed_codes >> 4))
    return torch.where(codes == 8, torch.zeros_like(codes), codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids="-".join)
def test_cases_write_what_the_package_writes(scheme: tuple[str, str, str]) -> None:
    case = case_of(scheme)
    check(case, make_checkpoint(case).tensors)


@pytest.mark.parametrize("scheme", SCHEMES, ids="-".join)
def test_one_wrong_bit_is_seen(scheme: tuple[str, str, str]) -> None:
    case = case_of(scheme)
    tensors = make_checkpoint(case).tensors
    for name in ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape"):
        whole = f"0.down_proj.{name}"
        if whole in tensors:
            changed = tensors[whole].clone()
            changed.view(-1)[-1:].view(torch.uint8)[0] ^= 2
            with pytest.raises(AssertionError):
                check(case, {**tensors, whole: changed})


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme[1] is not Layout.GROUP16], ids="-".join)
def test_the_package_reads_the_references_values(scheme: tuple[str, str, str]) -> None:
    case = case_of(scheme)
    kind, how = compressor(case)
    tensors = make_checkpoint(case).tensors
    for index, expert in enumerate(dense_experts(case)):
        stored = {key.rpartition(".")[2]: tensor.clone() for key, tensor in tensors.items() if key.startswith(f"{index}.up_proj.")}
        stored.pop("input_global_scale", None)
        read = kind.decompress(stored, how)["weight"].double()
        assert torch.equal(read, round_to(values(expert.up), Format.BF16))  # one product in bfloat16; NVFP4 rounds its scales first
