"""Triton kernels for test_triton_gaps.py. Imported after the lane is active: the decorator decides what a kernel is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast(source, target, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(target + offsets, tl.load(source + offsets).to(target.dtype.element_ty))


@triton.jit
def add_mul_clamp(a, b, added, multiplied, clamped, n: tl.constexpr):
    offsets = tl.arange(0, n)
    x, y = tl.load(a + offsets), tl.load(b + offsets)
    tl.store(added + offsets, x + y)
    tl.store(multiplied + offsets, x * y)
    tl.store(clamped + offsets, tl.maximum(x, y))


@triton.jit
def greater(a, b, out, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(out + offsets, tl.load(a + offsets) > tl.load(b + offsets))


@triton.jit
def matmul(a, b, out, n: tl.constexpr):
    rows, columns = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    x, y = tl.load(a + rows * n + columns), tl.load(b + rows * n + columns)
    tl.store(out + rows * n + columns, tl.dot(x, y))


@triton.jit
def rounded(source, target, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(target + offsets, tl.extra.cuda.libdevice.round(tl.load(source + offsets)))


@triton.jit
def inner(x):
    return tl.math.exp2(tl.ceil(tl.math.log2(x))) + tl.math.sqrt(x) + tl.math.floor(x) + tl.sigmoid(x) + tl.math.exp(-x)


@triton.jit
def nested(source, target, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(target + offsets, inner(tl.load(source + offsets)))


@triton.jit
def row_amax(source, target, n: tl.constexpr):
    tl.store(target, tl.max(tl.abs(tl.load(source + tl.arange(0, n)))))


@triton.jit
def strided_add(a, b, out, n, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < n
    tl.store(out + offsets, tl.load(a + offsets, mask=mask) + tl.load(b + offsets, mask=mask), mask=mask)


@triton.jit
def _through_core(x):
    return tl.core.sub(5, x, sanitize_overflow=False)


@triton.jit
def core_and_members(source, target, floors, n: tl.constexpr):
    offsets = tl.arange(0, n)
    x = tl.load(source + offsets)
    tl.store(target + offsets, _through_core(x))
    tl.store(floors + offsets, tl.log2(x).floor())
