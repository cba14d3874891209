"""Watching a layer load: its state before conversion, what every converter is handed, its parameters afterwards, bytes allocated."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from harness.subject.allocations import Ledger, Poison, fill
from harness.subject.loading import Allocated, Handed, Loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LAYERS = "vllm.model_executor.layers"
# Functions that make a kernel's layout out of loaded or quantized weights, wherever vLLM keeps them.
_CONVERTER = re.compile(
    r"(convert_(to_|weight_to_|gpt_oss_).*(kernel|moe)_format|prepare_.*_for_(marlin|deepgemm|fi\w*|flashinfer\w*|b12x|trtllm\w*))"
)
_KEPT = (torch.nn.Parameter, torch.Tensor)


@dataclass(slots=True)
class Watched:
    """Filled while ``watch_conversion`` is entered."""

    before: dict[str, torch.Tensor] = field(default_factory=dict)
    handed: list[Handed] = field(default_factory=list)
    allocated: Allocated | None = None

    def loading(self, experts: torch.nn.Module, consumed: dict[str, tuple[str, ...]] | None = None, ended: str = "") -> Loading:
        """Everything seen, once ``experts`` is loaded; ended: what its conversion raised."""
        return Loading(
            quant_method=type(experts.quant_method).__name__,
            before=self.before,
            after={} if ended else copies(experts.named_parameters()),
            ended=ended,
            consumed=consumed or {},
            handed=tuple(self.handed),
            allocated=self.allocated,
        )


def copies(named: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors on the CPU, none of them shared with the layer; strides as they are read, not as they lie."""
    return {name: each.detach().cpu().clone() for name, each in named if isinstance(each, _KEPT) and not each.is_meta}


@contextlib.contextmanager
def poisoned(sentinel: int | None) -> Iterator[None]:
    """Memory that nobody initialised holds ``sentinel``."""
    with Poison(sentinel) if sentinel is not None else contextlib.nullcontext():
        yield


def fill_parameters(experts: torch.nn.Module, sentinel: int | None) -> None:
    """Every parameter that already has memory, whatever it was initialised with. Where vLLM rounded the sizes up, what is not the
    checkpoint's is padding that vLLM may have initialised, and stays."""
    if sentinel is None or _rounded_up(experts):
        return
    for parameter in experts.parameters():
        fill(parameter.data, sentinel)


def _rounded_up(experts: torch.nn.Module) -> bool:
    sizes = getattr(experts, "moe_config", None)
    pairs = (("hidden_dim", "hidden_dim_unpadded"), ("intermediate_size_per_partition", "intermediate_size_per_partition_unpadded"))
    return any(getattr(sizes, padded, None) != getattr(sizes, plain, getattr(sizes, padded, None)) for padded, plain in pairs)


@contextlib.contextmanager
def watch_conversion(experts: torch.nn.Module, *, count: bool) -> Iterator[Watched]:
    """See the first process_weights_after_loading of the layer that owns ``experts``, and every converter called in it.

    count: keep the ledger of allocations; otherwise the tensors are copied, which would count.
    """
    seen = Watched()
    method = experts.quant_method
    process = method.process_weights_after_loading

    def watched(layer: torch.nn.Module) -> Any:
        if seen.before or seen.allocated is not None:
            return process(layer)
        if count:
            return _counted(process, layer, seen)
        seen.before = copies(layer.state_dict().items())
        with _converters(seen.handed):
            return process(layer)

    own = "process_weights_after_loading" in vars(method)
    method.process_weights_after_loading = watched
    try:
        yield seen
    finally:
        if own:
            method.process_weights_after_loading = process
        else:
            del method.process_weights_after_loading


def _counted(process: Callable[[torch.nn.Module], Any], layer: torch.nn.Module, seen: Watched) -> Any:
    known = [*layer.parameters(), *layer.buffers()]
    if any(each.is_cuda for each in known):
        return _counted_on_cuda(process, layer, seen)
    with Ledger(known) as ledger:
        result = process(layer)
    kept = sum(
        storage.nbytes()
        for storage in {each.untyped_storage()._cdata: each.untyped_storage() for each in layer.parameters()}.values()
        if not ledger.knows(storage)
    )
    seen.allocated = Allocated(peak=ledger.peak, kept=kept, largest=ledger.largest)
    return result


def _counted_on_cuda(process: Callable[[torch.nn.Module], Any], layer: torch.nn.Module, seen: Watched) -> Any:
    """The caching allocator's own statistics, of what was asked for: the blocks it hands out can be a mebibyte larger. It has none of
    single allocations."""
    device = next(layer.parameters()).device
    gc.collect()  # what an earlier layer left must not be given back meanwhile
    torch.cuda.synchronize(device)
    there = {each.untyped_storage().data_ptr(): StorageWeakRef(each.untyped_storage()) for each in layer.parameters()}
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    result = process(layer)
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in layer.parameters()}
    new = sum(size for key, size in kept.items() if key not in there or there[key].expired())  # addresses come twice
    seen.allocated = Allocated(peak=peak, kept=new, largest=0)
    return result


@contextlib.contextmanager
def _converters(handed: list[Handed]) -> Iterator[None]:
    """Every converter records what it is given before it begins."""
    with contextlib.ExitStack() as stack:
        for module, name, signature in _sites(len(sys.modules)):
            stack.enter_context(_recording(module, name, signature, handed))
        yield


@functools.lru_cache(maxsize=2)
def _sites(_modules: int) -> tuple[tuple[Any, str, inspect.Signature], ...]:
    """Where converters are called from: every module of vLLM's layers that has one by name."""
    found = []
    for key, module in list(sys.modules.items()):
        if key.startswith(_LAYERS) and module is not None:
            for name, value in list(vars(module).items()):
                if _CONVERTER.fullmatch(name) and inspect.isfunction(value):
                    found.append((module, name, inspect.signature(value)))
    return tuple(found)


@contextlib.contextmanager
def _recording(module: Any, name: str, signature: inspect.Signature, handed: list[Handed]) -> Iterator[None]:
    original = getattr(module, name)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        layer = next((each for each in given.values() if isinstance(each, torch.nn.Module)), None)
        state = {} if layer is None else copies(layer.state_dict().items())
        handed.append(Handed(converter=name, arguments=copies(given.items()), state=state))
        return original(*args, **kwargs)

    setattr(module, name, recorded)
    try:
        yield
    finally:
        setattr(module, name, original)
