"""Humming compiles a kernel for every range of batch sizes before the first forward; here only for the range that the batch lies in.

Which kernel runs is not changed: vLLM hands Humming the list of ranges and the batch's size, and of the list only that range is kept.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

_MODULE = "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe"
_METHOD = "prepare_humming_moe_kwargs"


def narrowed(tuning: str, size: int) -> str:
    """Of a JSON list of [above, up to, configuration] the range that ``size`` lies in, from 0 on: Humming's launcher asks for size 1 too.

    All of them where it lies in none.
    """
    ranges = json.loads(tuning)
    return json.dumps([[0, upper, config] for lower, upper, config in ranges if lower < size <= upper] or ranges)


def compile_what_runs() -> None:
    """Idempotent. A vLLM that hands its ranges over in another way, or elsewhere, compiles them all."""
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if f"{_MODULE}.".startswith(f"{error.name}."):
            return
        raise
    for _, experts in inspect.getmembers(module, inspect.isclass):
        method = vars(experts).get(_METHOD)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(experts, _METHOD, _narrowing(method))


def _narrowing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        prepared = method(*args, **kwargs)
        for given in prepared:
            if isinstance(given, dict) and isinstance(given.get("tuning_config"), str) and "valid_shape_m" in given:
                given["tuning_config"] = narrowed(given["tuning_config"], given["valid_shape_m"])
        return prepared

    return prepare
