"""What one state did with one pair, as plain data: the verdict, and names and digests of what was loaded and computed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.verdict import FaultFit, Outcome, Verdict

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from cases.batch import Batch
    from cases.case import Entry, MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject import Loaded, Ran, Subject

_CANNOT_IMPORT = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A tensor, named by its content."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One pair in one state."""

    pair: str  # case[entry]
    verdict: Verdict
    parameters: dict[str, Digest] = field(default_factory=dict)  # after loading, in the layer's order
    output: Digest | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    ran: dict[str, object] = field(default_factory=dict)
    control: str = ""  # what doubling the scales of an expert without tokens did: "identical", "changed", or "" (not asked, no such expert)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all parameters after loading."""
        return sum(digest.bytes for digest in self.parameters.values())

    @property
    def failed(self) -> bool:
        """True for what is neither a pass, nor a declared refusal, nor unavailable."""
        return self.verdict.outcome not in (Outcome.PASS, Outcome.UNSUPPORTED, Outcome.UNAVAILABLE)

    @property
    def cannot_import(self) -> bool:
        """True when vLLM or some module of it could not be imported: the state says nothing about the pair."""
        if self.verdict.outcome is Outcome.UNAVAILABLE:
            return self.verdict.signature == NO_STATE
        return self.verdict.outcome in (Outcome.LOAD_ERROR, Outcome.RUN_ERROR) and self.verdict.detail.startswith(_CANNOT_IMPORT)

    @property
    def signature(self) -> str:
        """Outcome and what kind of failure, equal for equal faults in different trees: folders and addresses are taken out."""
        said = re.sub(r"0x[0-9a-fA-F]+|(/[\w.+@-]+){2,}/", "", self.verdict.signature)
        return f"{self.verdict.outcome} {said}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Observation:
        """Inverse of ``to_dict`` after JSON."""
        said = given["verdict"]
        fits = tuple(FaultFit(**fit | {"experts": tuple(fit["experts"])}) for fit in said["fits"])
        verdict = Verdict(**said | {"outcome": Outcome(said["outcome"]), "fits": fits})
        parameters = {name: _digest_from(each) for name, each in given["parameters"].items()}
        output = _digest_from(given["output"]) if given["output"] else None
        return cls(**given | {"verdict": verdict, "parameters": parameters, "output": output})


def kept_name(pair: str) -> str:
    """File name of a pair's tensors."""
    return f"{hashlib.sha256(pair.encode()).hexdigest()[:24]}.pt"


NO_STATE = "STATE"  # signature of a pair whose state cannot be driven at all
NO_PAIR = "PAIR"  # signature of a pair that could not be tried, in a state that can be driven


def unavailable(pair: str, sentence: str, signature: str = NO_PAIR) -> Observation:
    """A pair that could not be tried."""
    return Observation(pair=pair, verdict=Verdict(outcome=Outcome.UNAVAILABLE, claim=sentence, detail=sentence, signature=signature))


def _digest_from(given: dict[str, Any]) -> Digest:
    return Digest(**given | {"shape": tuple(given["shape"])})


def digest(tensor: torch.Tensor) -> Digest:
    """Of the elements in row-major order, whatever the strides."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    return Digest(
        shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest()
    )


class Watched:
    """A subject that remembers what it loaded and computed last; changes nothing it takes or returns."""

    def __init__(self, subject: Subject) -> None:
        """Wraps ``subject``."""
        self._subject = subject
        self.name = subject.name
        self.parameters: dict[str, torch.Tensor] = {}
        self.output: torch.Tensor | None = None

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """As the subject's."""
        self.parameters, self.output = {}, None
        loaded = self._subject.load(case, entry, checkpoint)
        self.parameters = {name: tensor.detach().cpu().clone() for name, tensor in loaded.parameters.items()}  # a run may write to them
        return loaded

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """As the subject's."""
        ran = self._subject.run(loaded, batch)
        self.output = ran.output
        return ran

    def keep(self, path: Path) -> None:
        """Write the tensors for a later look at the first element that differs."""
        import torch

        torch.save({"parameters": self.parameters, "output": self.output}, path)


def control(case: MoECase, entry: Entry, subject: Subject) -> str:
    """Double every weight scale of the expert without tokens, and say whether the output is "identical" or "changed".

    "" where there is no such expert, the checkpoint has no scales, or their format cannot hold the double of each.
    """
    from cases.batch import make_batch
    from cases.case import InvalidCase, Origin
    from cases.checkpoint import make_checkpoint
    from cases.perturb import Spot, perturb
    from cases.roles import empty_expert

    expert = empty_expert(case)
    if expert is None or case.origin is not Origin.PREQUANTIZED:
        return ""
    plain, batch = make_checkpoint(case), make_batch(case)
    doubled = plain
    try:
        for projection in case.projections:
            doubled = perturb(case, doubled, Spot(expert=expert, projection=projection), 2.0)
    except InvalidCase:
        return ""
    before, after = (subject.run(subject.load(case, entry, each), batch).output for each in (plain, doubled))
    return "identical" if digest(before) == digest(after) else "changed"
