"""Printing of the commands: plain text on stdout, tables as wide as the terminal."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType


def say(text: str) -> None:
    """One block of plain text."""
    if text:
        sys.stdout.write(text + "\n")


def draw(*what: RenderableType) -> None:
    """Tables and styled text; plain where stdout is no terminal."""
    console = Console(highlight=False, soft_wrap=False)
    for each in what:
        console.print(each)
