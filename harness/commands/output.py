"""Printing of the commands: plain text on stdout, tables as wide as the terminal."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

_WIDE = 140


def say(text: str) -> None:
    """One block of plain text."""
    if text:
        sys.stdout.write(text + "\n")


def draw(*what: RenderableType) -> None:
    """Tables and styled text; plain, and wide enough for an id, where stdout is no terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    for each in what:
        console.print(each)
