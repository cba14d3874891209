"""``python -m harness.bisect.tests.moediff``: the bisecting commands alone, as the command line has them."""

from __future__ import annotations

import sys

from harness.bisect.commands import add_subcommands
from harness.cli import Parser
from harness.exits import Misuse


def main() -> int:
    """As ``harness.cli.main``."""
    whole = Parser(prog="moediff")
    add_subcommands(whole.add_subparsers(required=True))
    try:
        arguments = whole.parse_args()
        return int(arguments.handler(arguments))
    except Misuse as error:
        sys.stderr.write(f"moediff: {error}\n")
        return error.exit


if __name__ == "__main__":
    sys.exit(main())
