"""``python -m harness.bisect.tests.fake_moediff``: ``moediff`` over the installation that MOEDIFF_FAKE_INSTALLATION names.

Without that variable it is the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import cli, preflight
from harness.bisect import states
from harness.bisect.installation import Installation


def main(arguments: Sequence[str] | None = None) -> int:
    """As ``harness.cli.main``."""
    if root := os.environ.get("MOEDIFF_FAKE_INSTALLATION"):
        fake(Path(root))
    return cli.main(arguments)


def fake(root: Path) -> None:
    """In a process of its own only: nothing is put back."""
    states.WORKER = "harness.bisect.tests.fake_worker"
    Installation.find = classmethod(lambda cls: cls(root=root, version="0.33.0"))  # type: ignore[method-assign, assignment]
    preflight.check = lambda backend, subject: None


if __name__ == "__main__":
    sys.exit(main())
