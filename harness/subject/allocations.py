"""Two dispatch modes: one fills uninitialised memory with a sentinel, one keeps a ledger of what is allocated and still lives."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_UNINITIALISED = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


def fill(tensor: torch.Tensor, byte: int) -> None:
    """Every element becomes NaN where the dtype has one (the sign bit follows ``byte``), else ``byte`` in each of its bytes."""
    if tensor.is_meta or tensor.numel() == 0:
        return
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(torch.nan if byte & 0x80 else -torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(byte)
    else:
        whole = torch.full((tensor.element_size(),), byte, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
        tensor.copy_(whole.expand(tensor.shape))


class Poison(TorchDispatchMode):
    """Uninitialised memory holds the sentinel, whoever allocates it."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED:
            fill(made, self._byte)
        return made


class Ledger(TorchDispatchMode):
    """Bytes of storages that operators made while the mode is entered, for as long as they live.

    peak: most bytes alive at once; largest: the largest storage. Storages of ``known`` are not counted: they were there before.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self.largest = self._alive = 0
        self._known = {each.untyped_storage()._cdata: each.untyped_storage() for each in known}  # held, so that no address comes twice
        self._living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self._note(each.untyped_storage())
        return made

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was there before."""
        return storage._cdata in self._known

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._living or size == 0:
            return

        def gone(_: object) -> None:
            self._living.pop(key, None)
            self._alive -= size

        self._living[key] = weakref.ref(storage, gone)
        self._alive += size
        self.peak, self.largest = max(self.peak, self._alive), max(self.largest, size)
