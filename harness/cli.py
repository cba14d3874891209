"""``moediff``, the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.program import ended


def main(argv: Sequence[str] | None = None) -> int:
    """Returns one of harness.exits.Exit, or 3 when pytest itself broke."""
    return ended("moediff", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    from harness.command_line import parser  # only now: what it imports may not be installed

    arguments = parser().parse_args(argv)
    return int(arguments.handler(arguments))


if __name__ == "__main__":
    sys.exit(main())
