"""In which order tests run on a lane that compiles: those that launch the same kernels side by side, so that one worker compiles them.

xdist gives each worker a stretch of the tests. What a kernel is compiled for: how numbers are stored and scaled, the door (each has its
own order of operations), sizes, whether there is a bias. Activations are other kernels than the GEMMs that take the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from harness.pairs import Pair

if TYPE_CHECKING:
    import pytest


class Asked(Protocol):
    """Of a pair: a relation, a question about its loading, a check of the device; or the pair."""

    @property
    def id(self) -> str:
        """What pytest shows and records hold."""
        ...

    @property
    def pair(self) -> Pair:
        """Whom it is asked of."""
        ...


ASKED = ("pair", "related", "loading", "checked")  # parameters of the suite's tests: a pair, or something asked of one


def asked(item: pytest.Item) -> Asked | None:
    """The pair a test is about, or what it asks of one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next((parameters[name] for name in ASKED if name in parameters), None)


def pair_of(item: pytest.Item) -> Pair | None:
    """The pair a test is about."""
    about = asked(item)
    return about if about is None or isinstance(about, Pair) else about.pair


def kernels(pair: Pair) -> tuple[str | int, ...]:
    """Equal where two pairs launch the same GEMM kernels."""
    case, entry = pair
    numbers = (case.weight, case.weight_scale, case.act_scale, case.dtype, case.stored, entry)
    sizes = (case.top_k, case.hidden, case.intermediate, case.experts, case.tokens)
    return (*map(str, numbers), int(case.bias), int(case.router_weight_on_input), *sizes, int(case.activation.gated))


def by_kernel(items: list[pytest.Item]) -> list[pytest.Item]:
    """Stable; what is about no pair stays in front."""
    return sorted(items, key=lambda item: (1, *kernels(pair)) if (pair := pair_of(item)) is not None else (0,))
