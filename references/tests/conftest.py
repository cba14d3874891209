"""Hypothesis: the same examples on every machine, and no deadline, because machines are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("moediff", deadline=None, derandomize=True)
settings.load_profile("moediff")
