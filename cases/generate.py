"""Which pairs each level holds. (First slice; widened in place.)"""

from __future__ import annotations

from cases.case import Entry, Level, MoECase, entry_takes

_SLICE = (
    "int8-channel-dyntoken-ct-silu-fp16-e4k2m8h128i64-balanced",
    "int8-channel-dyntoken-quark-silu-bf16-e4k2m8h128i64-balanced",
    "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced",
    "e4m3fn-channel-dyntoken-ct-silu-fp16-e4k2m8h128i64-balanced",
    "bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced",
    "fp32-none-none-plain-relu2_no_mul-fp32-e4k2m8h128i64-balanced",
)


def pairs(level: Level) -> tuple[tuple[MoECase, Entry], ...]:
    """(case, entry) of a level, sorted, each once."""
    cases = sorted((MoECase.from_id(text) for text in _SLICE), key=lambda case: case.id)
    return tuple((case, entry) for case in cases for entry in Entry if entry_takes(case, entry))


def cases(level: Level) -> tuple[MoECase, ...]:
    """The cases of a level, sorted by id, each once."""
    return tuple(dict.fromkeys(case for case, _ in pairs(level)))
