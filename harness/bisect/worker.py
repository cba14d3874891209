"""One state in a process of its own: ``python -P -m harness.bisect.worker TASK``, with the state's tree first on PYTHONPATH.

Writes a line of JSON for each event, flushed at once: ``opened``, ``unavailable``, ``started``, ``observed``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bisect.observe import Observation, Watched, control, digest, kept_name, unavailable
from harness.bisect.trouble import Exit
from harness.pairs import Pair, parse_case, parse_entry
from harness.subject import LoadFailed, RunFailed, SubjectUnavailable
from harness.suite import subjects
from harness.suite.options import parse_backend

if TYPE_CHECKING:
    from harness.backends import Backend
    from harness.subject import Subject

_OURS = ("cases", "harness", "references")  # what is missing here is no state's fault
Opener = Callable[[str, "Backend"], "Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is told."""

    pairs: tuple[tuple[str, str], ...]  # (case id, entry)
    backend: str
    subject: str  # "vllm"
    tree: str  # folder that vllm must come from; "" for the installation
    events: str  # file to write to
    keep: str = ""  # folder for tensors
    controls: bool = False

    def write(self, path: Path) -> None:
        """For ``read``."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        """Raises ValueError or TypeError on anything else."""
        given = json.loads(path.read_text())
        return cls(**given | {"pairs": tuple((case, entry) for case, entry in given["pairs"])})


def main(arguments: Sequence[str], open_subject: Opener = subjects.open_subject) -> int:
    """0 when every pair was tried, 125 when the state cannot be driven."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = Task.read(Path(arguments[0]))
    backend = parse_backend(task.backend)
    with Path(task.events).open("a", encoding="utf-8") as file:

        def tell(event: str, value: Any) -> None:
            file.write(json.dumps({event: value}, ensure_ascii=False) + "\n")
            file.flush()

        began = time.perf_counter()
        if wrong := _elsewhere(task.tree):
            tell("unavailable", wrong)
            return Exit.CANNOT_TELL
        try:
            subject = Watched(open_subject(task.subject, backend))
        except SubjectUnavailable as error:
            tell("unavailable", str(error))
            return Exit.CANNOT_TELL
        except Exception as error:  # a state may fail to import in any way; every way is reported with its place
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _OURS:
                raise
            tell("unavailable", f"importing vllm failed: {_place(error, task.tree)}")
            return Exit.CANNOT_TELL
        tell("opened", {"subject": subject.name, "seconds": time.perf_counter() - began})
        for case, entry in task.pairs:
            pair = Pair(parse_case(case), parse_entry(entry))
            tell("started", pair.id)
            tell("observed", observe(pair, backend, subject, controls=task.controls).to_dict())
            if task.keep:
                subject.keep(Path(task.keep) / kept_name(pair.id))
    return Exit.GOOD


def _end_with_parent() -> None:
    """Stdin is the parent's pipe: it ends when the parent does, however that ended."""
    os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter shuts down
    os._exit(Exit.MISUSE)


def observe(pair: Pair, backend: Backend, subject: Watched, *, controls: bool = False) -> Observation:
    """Drive one pair. What the harness itself cannot do with this vLLM is UNAVAILABLE: neither good nor bad."""
    from harness.pipeline import run_pair

    try:
        result = run_pair(pair.case, pair.entry, backend, subject)
        parameters = {name: digest(tensor) for name, tensor in subject.parameters.items()}
        output = None if subject.output is None else digest(subject.output)
        checked = control(pair.case, pair.entry, subject) if controls and output is not None else ""
    except (SubjectUnavailable, LoadFailed, RunFailed) as error:
        return unavailable(pair.id, str(error))
    except Exception as error:  # noqa: BLE001 - an older vLLM may return what the harness does not know
        traceback.print_exc()
        return unavailable(pair.id, f"the harness cannot drive this vLLM: {_place(error, '')}")
    return Observation(
        pair=pair.id,
        verdict=result.verdict,
        parameters=parameters,
        output=output,
        seconds=result.timings,
        ran=result.extras,
        control=checked,
    )


def _elsewhere(tree: str) -> str:
    """A sentence when vllm would not be imported from ``tree``."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "there is no vllm to import: is it a checkout of vLLM?"
    if tree and Path(tree).resolve() not in Path(spec.origin).resolve().parents:
        return (
            f"vllm would be imported from {os.path.dirname(spec.origin)} instead of {tree}: remove the .pth file or hook that puts it first"
        )
    return ""


def _place(error: BaseException, tree: str) -> str:
    """``Type: text (file:line)`` of where it was raised, the file relative to the tree."""
    frames = traceback.extract_tb(error.__traceback__)
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    where = os.path.relpath(file, tree) if tree and Path(tree) in Path(file).parents else file
    return f"{type(error).__name__}: {text} ({where}:{line})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
