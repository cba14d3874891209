"""What a pair leaves in vLLM and in what it was handed: nothing. Functions of vLLM's modules and classes that were wrapped are its own
again, and no byte of a checkpoint or a batch has changed, which the reference reads too."""

from __future__ import annotations

import hashlib
import inspect
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from cases.batch import Batch, make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint, make_checkpoint
from harness.subject import LoadFailed, RunFailed
from harness.subject.loading import Depth
from harness.subject.tests.test_vllm_layer import BLOCKS, RUNS, SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm
LAYERS = (
    *(text for text, *_ in RUNS),
    f"bf16-none-none-plain-silu-bf16-{SMALL}-norenorm-onin".replace("k2", "k1"),
    "uint4-group128-none-gptq-silu-bf16-e4k2m8h128i128-balanced",
    "uint4-group128-none-awq-silu-fp16-e4k2m8h128i128-balanced",
    "e2m1-group16-dyngroup16-ct-silu-bf16-e4k2m8h128i64-balanced",
    "e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h128i64-balanced-bias",
)
DOORS = (
    *((text, Entry.LAYER) for text in LAYERS),
    (f"int8-channel-static-quark-silu-bf16-{SMALL}", Entry.FUSED_EXPERTS),
    (f"e4m3fn-block128-dyngroup128-raw-silu-bf16-{BLOCKS}", Entry.FUSED_EXPERTS),
    (f"bf16-none-none-plain-silu-bf16-{SMALL}", Entry.BATCHED),
    (f"e4m3fn-tensor-static-raw-silu-bf16-{SMALL}-norenorm-onin".replace("k2", "k1"), Entry.BATCHED),
    (f"e4m3fn-channel-dyntoken-raw-silu-bf16-{SMALL}", Entry.BATCHED),
)
SOME = [DOORS[LAYERS.index(text)] for text in (LAYERS[3], LAYERS[7], *LAYERS[-2:])] + list(DOORS[-6:])


def _tensors(checkpoint: Checkpoint, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield from checkpoint.tensors.items()
    yield from ((name, value) for name in Batch.__dataclass_fields__ if isinstance(value := getattr(batch, name), torch.Tensor))


def _digests(checkpoint: Checkpoint, batch: Batch) -> dict[str, str]:
    return {
        name: hashlib.sha256(each.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for name, each in _tensors(checkpoint, batch)
    }


def _functions() -> dict[tuple[str, str], object]:
    """Functions and classes of vLLM's modules, and functions of its layers' classes."""
    found: dict[tuple[str, str], object] = {}
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] != "vllm" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if inspect.isroutine(value) or inspect.isclass(value):
                found[key, name] = value
            if inspect.isclass(value) and value.__module__.startswith("vllm.model_executor.layers"):
                found |= {
                    (f"{value.__module__}.{value.__qualname__}", method): each
                    for method, each in vars(value).items()
                    if inspect.isroutine(each)
                }
    return found


@pytest.mark.parametrize(("text", "entry"), DOORS, ids=[f"{text}[{entry}]" for text, entry in DOORS])
def test_what_is_handed_over_is_left_as_it_is(subject: VllmSubject, text: str, entry: Entry) -> None:
    case = MoECase.from_id(text)
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    before = _digests(checkpoint, batch)
    loaded = subject.load(case, entry, checkpoint)
    first, second = (subject.run(loaded, batch).output for _ in range(2))
    assert _digests(checkpoint, batch) == before
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    shared = {each.untyped_storage().data_ptr() for each in loaded.parameters.values() if each.numel()}
    assert not [name for name, each in _tensors(checkpoint, batch) if each.untyped_storage().data_ptr() in shared]
    if entry is Entry.LAYER:
        for depth in (Depth.LAYER, Depth.DIRECTORY):
            subject.watch_loading(case, checkpoint, depth=depth, sentinel=0x7F)
        assert _digests(checkpoint, batch) == before


def test_vllms_functions_are_its_own_again(subject: VllmSubject) -> None:
    def everything() -> None:
        for text, entry in SOME:
            case = MoECase.from_id(text)
            loaded = subject.load(case, entry, make_checkpoint(case))
            subject.run(loaded, make_batch(case))
            with subject.operand_swaps(allowed=False):
                subject.run(loaded, make_batch(case))
        case = MoECase.from_id(f"e4m3fn-channel-dyntoken-ct-silu-bf16-{SMALL}")
        for depth in Depth:
            subject.watch_loading(case, make_checkpoint(case), depth=depth, sentinel=0x7F)
        subject.watch_loading(case, make_checkpoint(case))
        with subject.as_rank(1, 2):
            subject.watch_loading(case, make_checkpoint(case), sentinel=0x7F, unfinished=True)
        for text in (f"e4m3fn-channel-static-ct-silu-bf16-{SMALL}", f"int8-channel-static-quark-silu-bf16-{SMALL}"):
            case = MoECase.from_id(text)
            with pytest.raises((LoadFailed, RunFailed)):
                subject.run(subject.load(case, Entry.LAYER, make_checkpoint(case)), make_batch(case))

    everything()  # imports what it imports
    before = _functions()
    everything()
    after = _functions()
    assert {name for name, value in before.items() if after.get(name) is not value} == set()
    assert len(before) > 1000
