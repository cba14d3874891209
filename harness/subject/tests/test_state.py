"""Nothing is left behind: the same case gives the same bits alone, after twenty others and after failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.subject import LoadFailed, RunFailed
from harness.subject.hygiene import pristine
from harness.subject.tests.test_vllm_layer import BLOCKS, RUNS, SMALL, digest, once

if TYPE_CHECKING:
    from pathlib import Path

    from harness.subject.vllm_layer import VllmSubject

WITNESSES = (
    (f"int8-channel-dyntoken-ct-silu-fp32-{SMALL}", Entry.LAYER),
    (f"e4m3fn-block128-dyngroup128-online-silu-bf16-{BLOCKS}", Entry.LAYER),
    (f"e4m3fn-tensor-dyntensor-raw-silu-fp16-{SMALL}", Entry.FUSED_EXPERTS),
)
ALONE = """
import os, sys
from cases.case import Entry
from harness.subject.tests.test_vllm_layer import digest, once
from harness.subject.vllm_layer import VllmSubject
subject = VllmSubject()
print(digest(once(subject, sys.argv[1], Entry(sys.argv[2]))[1]))
"""


def _state() -> dict[str, object]:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.forward_context import is_forward_context_available

    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "random": torch.random.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "excepthook": sys.excepthook,
        "python threads": threading.active_count(),
        "vllm config": get_current_vllm_config_or_none(),
        "forward context": is_forward_context_available(),
    }


@pytest.mark.parametrize("before", ["default", "own", None])
def test_a_stream_that_vllm_made_the_current_one_does_not_stay_it(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """None: CUDA is initialised by what runs inside."""

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            waited.append((str(self), str(other)))

    waited: list[tuple[str, str]] = []
    current = [Stream(before or "default")]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: before is not None or current != ["default"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: Stream("default"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with pristine():
        current[0] = Stream("vLLM's")
    assert (current, waited) == ([before or "default"], [(before or "default", "vLLM's")])
    with pristine():
        pass
    assert len(waited) == 1


@pytest.mark.vllm
@pytest.mark.parametrize(("text", "entry"), WITNESSES, ids=[text for text, _ in WITNESSES])
def test_alone_after_twenty_and_after_failures(subject: VllmSubject, text: str, entry: Entry, tmp_path: Path) -> None:
    for folder in ("temporary", "working"):
        (tmp_path / folder).mkdir()
    fresh = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "CUTE", "VLLM", "TRITON"))}
    environment = fresh | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ALONE, text, entry.value]
    done = subprocess.run(command, cwd=tmp_path / "working", env=environment, capture_output=True, text=True, check=True)
    alone = done.stdout.split()
    assert len(alone) == 1, done.stdout
    assert done.stderr == ""
    assert [path for folder in ("temporary", "working") for path in (tmp_path / folder).iterdir()] == []

    for _ in range(2):
        for other, *_ in RUNS[:10]:
            once(subject, other)
    assert digest(once(subject, text, entry)[1]) == alone[0]

    for failing, where in (
        (f"e4m3fn-channel-static-ct-silu-bf16-{SMALL}", Entry.LAYER),
        (f"int8-channel-static-quark-silu-bf16-{SMALL}", Entry.LAYER),
        (f"int8-tensor-dyntensor-raw-silu-bf16-{SMALL}", Entry.FUSED_EXPERTS),
    ):
        with pytest.raises((LoadFailed, RunFailed)):
            once(subject, failing, where)
        assert digest(once(subject, text, entry)[1]) == alone[0]


@pytest.mark.vllm
@pytest.mark.parametrize("failing", ["nothing", "building", "loading", "processing", "running"])
def test_a_failure_leaves_the_state_alone(subject: VllmSubject, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.subject import vllm_compat

    case = MoECase.from_id(f"int8-channel-dyntoken-ct-silu-bf16-{SMALL}")
    once(subject, case.id)
    before = _state()

    def trash(*_: object, **__: object) -> None:
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        torch.manual_seed(1)
        os.environ["MOEDIFF_TRASH"] = "1"
        os.chdir("/")
        raise KeyError("half-way")

    target = {"building": "make_layer", "processing": "finish_loading", "running": "forward_context"}.get(failing)
    if target:
        monkeypatch.setattr(vllm_compat, target, trash)
    checkpoint = make_checkpoint(case)
    if failing == "loading":
        checkpoint.tensors["0.up_proj.weight"] = checkpoint.tensors["0.up_proj.weight"].repeat(2, 2)
    expected = {"nothing": None, "running": RunFailed}.get(failing, LoadFailed)
    with pytest.raises(expected, match=None if failing == "loading" else "KeyError: 'half-way'") if expected else nullcontext():
        subject.run(subject.load(case, Entry.LAYER, checkpoint), make_batch(case))
    assert _state() == before


@pytest.mark.vllm
def test_layers_are_released(subject: VllmSubject) -> None:
    import gc
    import weakref

    case = MoECase.from_id(f"bf16-none-none-plain-silu-bf16-{SMALL}")
    loaded = subject.load(case, Entry.LAYER, make_checkpoint(case))
    subject.run(loaded, make_batch(case))
    layer = weakref.ref(loaded.handle.module)  # type: ignore[attr-defined]
    del loaded
    gc.collect()
    assert layer() is None


class Lost:
    """A stream of a device that is lost."""

    def wait_stream(self, other: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("lost", [False, True])
def test_everything_named_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    def trash() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.random.manual_seed(torch.random.initial_seed() + 1)
        os.environ["MOEDIFF_TRASH"] = "1"
        os.chdir(tmp_path)
        sys.excepthook = print
        raise ZeroDivisionError

    def state() -> list[object]:
        modes = [torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), sys.excepthook]
        return [*modes, torch.random.get_rng_state().tolist(), dict(os.environ), os.getcwd()]

    before = state()
    if lost:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", Lost)
    with pytest.raises(RuntimeError if lost else ZeroDivisionError), pristine():
        trash()
    assert state() == before
