"""What a pair gave that is new or wrong, kept beside the records: it can be judged again where there is no GPU (harness/rejudge.py)."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from reports.records import writing

if TYPE_CHECKING:
    import torch

    from reports.records import Record

LARGEST = 4 * 2**20  # bytes of an output
MOST = 2000  # files of a run; a nightly lane has some 300 known mismatches


def directory(run: Path) -> Path:
    """Where a run keeps them."""
    return run / "outputs"


def file_of(run: Path, pair: str) -> Path:
    """One a pair."""
    return directory(run) / f"{hashlib.sha256(pair.encode()).hexdigest()[:16]}.pt"


def wanted(record: Record) -> bool:
    """Whether a verdict may change with the bounds or the ledger: a pair that is new, or a mismatch that the ledger knows."""
    return record.kind == "pair" and (record.status == "new" or record.verdict.outcome == "MISMATCH")


def forget(run: Path, pair: str) -> None:
    """What an earlier attempt at the pair gave: its next record is not about that. Raises RecordsUnwritable."""
    with writing(file := file_of(run, pair)):
        file.unlink(missing_ok=True)


def keep(run: Path, record: Record, output: torch.Tensor) -> None:
    """Nothing is kept of a large output, nor when there are many. Raises RecordsUnwritable; then no half of a file is left."""
    import torch

    if output.numel() * output.element_size() > LARGEST or len(list(directory(run).glob("*.pt"))) >= MOST:
        return
    held = io.BytesIO()
    torch.save({"backend": record.backend, "outputs": {record.pair: output}}, held)
    with writing(file := file_of(run, record.pair)):
        directory(run).mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        try:
            part.write_bytes(held.getbuffer())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
