"""Online MXFP8 with Humming, on the CPU: 0 its weights are converted, 1 converting raises, 125 this vLLM has no such path.

Converting is host code; what follows it needs the device, and is not reached.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from harness.subject.vllm_layer import VllmSubject

VllmSubject("humming", device="cpu", interpreter=True)  # the interpreter lane, before anything of vLLM is imported

import torch  # noqa: E402

from harness.subject import vllm_compat  # noqa: E402

UTILITIES = "vllm.model_executor.layers.quantization.utils"
SIZES = {"experts": 2, "top_k": 1, "hidden": 128, "intermediate": 128}


class Converted(BaseException):
    """Both projections of w13 have passed."""


def watch_conversion() -> None:
    """End the load where the first conversion has returned."""
    for name in (f"{UTILITIES}.humming.moe", f"{UTILITIES}.humming_utils"):
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        convert = module._convert_sublayer_to_humming

        def converted(*arguments: object, _convert: Callable[..., object] = convert, **named: object) -> None:
            _convert(*arguments, **named)
            raise Converted

        module._convert_sublayer_to_humming = converted
        return
    sys.stderr.write("no conversion to Humming in this vLLM\n")
    sys.exit(125)


def make_layer(quantization: object) -> Any:
    """Ends with 125 where this vLLM does not let Humming have the layer."""
    try:
        return vllm_compat.make_layer(
            **SIZES,
            dtype=torch.float16,
            activation="silu",
            renormalize=True,
            bias=False,
            router_weight_on_input=False,
            swiglu=None,
            quantization=quantization,
            prefix="model.layers.0.mlp.experts",
        )
    except ValueError as error:
        sys.stderr.write(f"refused: {error}\n")
        sys.exit(125)


def main() -> None:
    """Raises what vLLM raises."""
    surface = vllm_compat.probe_surface()
    if "online config" not in surface or "online arguments" not in surface:
        sys.stderr.write("no online quantization in this vLLM\n")
        sys.exit(125)
    watch_conversion()
    config = vllm_compat.vllm_config("humming", torch.float16, **SIZES)
    no_device = mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext())  # the context around converting
    with vllm_compat.current_config(config), torch.device("cpu"), no_device:
        vllm_compat.prepare_process("cpu")
        layer = make_layer(surface["online config"](surface["online arguments"](None, {"moe": "mxfp8"})))
        names = [f"{expert}.{name}.weight" for expert in range(2) for name in ("gate_proj", "up_proj", "down_proj")]
        with contextlib.suppress(Converted):
            list(layer.load_weights((name, torch.randn(128, 128, dtype=torch.float16)) for name in names))
            vllm_compat.finish_loading(layer, config)
            sys.stderr.write("loading ended without converting\n")
            sys.exit(125)


main()
