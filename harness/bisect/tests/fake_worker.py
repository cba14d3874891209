"""A worker whose subject is the fake, with the fault that the state's own ``vllm`` package names."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

from cases.batch import Batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from harness.backends import Backend
from harness.bisect.worker import main
from harness.faults import Fault
from harness.subject import Loaded, LoadFailed, Ran, Subject, SubjectUnavailable
from harness.subject.fake import FakeSubject


class TreeSubject(FakeSubject):
    """``vllm.STATE`` is "honest", a fault's name, or one of the misbehaviours below."""

    def __init__(self, state: str, backend: Backend) -> None:
        super().__init__(Fault[state] if state in Fault.__members__ else None, backend)
        self.state = state

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        if self.state.startswith(("KeyError", "ModuleNotFoundError", "ValueError")):
            raise LoadFailed(self.state)
        if self.state == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.state == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.state == "hang":
            time.sleep(3600)
        if self.state == "unfamiliar":
            raise SubjectUnavailable("no layer factory at vllm.layer:FusedMoE")
        loaded = super().load(case, entry, checkpoint)
        weight = checkpoint.tensors["0.down_proj.weight"].repeat(3 if self.state == "fat" else 1, 1)
        return Loaded(
            handle=loaded.handle,
            quant_method=loaded.quant_method,
            experts_class=loaded.experts_class,
            parameters={"0.down_proj.weight": weight + 1 if self.state == "bits" else weight},
        )

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        return super().run(loaded, batch)


def open_subject(_spec: str, backend: Backend) -> Subject:
    """Imports the state's vllm, as the real one does."""
    state = importlib.import_module("vllm").STATE
    if state == "unknown surface":
        raise SubjectUnavailable("the surface of vllm 9.9 is not recognised")
    return TreeSubject(state, backend)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_subject))
