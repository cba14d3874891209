"""``python -m harness.bisect.tests.fake_moediff``: the bisecting commands over the installation that MOEDIFF_FAKE_INSTALLATION names.

Without that variable they are the real ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import preflight
from harness.bisect import commands, states
from harness.bisect.installation import Installation
from harness.cli import Parser
from harness.exits import Misuse


def main(arguments: Sequence[str] | None = None) -> int:
    """As ``harness.cli.main``."""
    if root := os.environ.get("MOEDIFF_FAKE_INSTALLATION"):
        fake(Path(root))
    whole = Parser(prog="moediff")
    commands.add_subcommands(whole.add_subparsers(required=True))
    try:
        parsed = whole.parse_args(arguments)
        return int(parsed.handler(parsed))
    except Misuse as error:
        sys.stderr.write(f"moediff: {error}\n")
        return error.exit


def fake(root: Path) -> None:
    """In a process of its own only: nothing is put back."""
    states.WORKER = "harness.bisect.tests.fake_worker"
    Installation.find = classmethod(lambda cls: cls(root=root, version="0.33.0"))  # type: ignore[method-assign, assignment]
    preflight.check = lambda backend, subject: None


if __name__ == "__main__":
    sys.exit(main())
