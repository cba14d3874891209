"""What Triton's interpreter computes wrongly or refuses, filled in one place.

Each function looks whether its gap is there before it patches ``InterpreterBuilder``, and has its own test. bfloat16 lives
as uint16 and fp8 as uint8 in the interpreter's numpy arrays, so arithmetic that is not taught about them works on bit patterns.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
_FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}
_NARROW = frozenset(dtype.name for dtype in (tl.bfloat16, *_FP8))  # by name: comparing tl.dtype objects is slow


def to_float32(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Values of an interpreter array as float32 (exact for every type of at most 16 bits)."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FP8:
        return torch.from_numpy(np.ascontiguousarray(data)).view(_FP8[dtype][0]).float().numpy()
    return data.astype(np.float32)


def from_float32(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 values in the interpreter's storage of ``dtype``: round half to even, fp8 saturates like ``cvt.rn.satfinite``."""
    if dtype == tl.bfloat16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16).reshape(values.shape)
    if dtype in _FP8:
        torch_dtype, largest = _FP8[dtype]
        bounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).clamp(-largest, largest)
        return bounded.to(torch_dtype).view(torch.uint8).numpy().reshape(values.shape)
    return values.astype(interpreter._get_np_dtype(dtype))


def _narrow(*handles: object) -> bool:
    return any(isinstance(handle, Handle) and handle.dtype.scalar.name in _NARROW for handle in handles)


def fill_casts() -> bool:
    """float32 -> bfloat16 truncates, int -> bfloat16 keeps the integer as a bit pattern, fp8 casts round half up."""
    builder = interpreter.interpreter_builder
    telling = Handle(np.array([1 + 3 * 2.0**-9, 1 + 2.0**-8, 2 - 2.0**-9], np.float32), tl.float32)  # above a tie, a tie, a carry
    integer = Handle(np.array([1], np.int8), tl.int8)
    if builder.create_fp_trunc(telling, tl.bfloat16).data.tolist() == [0x3F81, 0x3F80, 0x4000] and (
        builder.create_si_to_fp(integer, tl.bfloat16).data[0] == 0x3F80
    ):
        return False
    original = Builder.cast_impl

    def cast(self: object, src: object, dst_type: tl.dtype) -> object:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.name not in _NARROW and target.name not in _NARROW:
            return original(self, src, dst_type)
        values = to_float32(src.data, source) if source.name in _NARROW else src.data.astype(np.float32)
        return Handle(from_float32(values, target), target)

    Builder.cast_impl = cast
    fallback = Builder.create_fp_to_fp

    def fp_to_fp(self: object, src: object, dst_type: tl.dtype, rounding_mode: object) -> object:
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return fallback(self, src, dst_type, rounding_mode)
        return cast(self, src, dst_type)

    Builder.create_fp_to_fp = fp_to_fp
    return True


def fill_arithmetic() -> bool:
    """bfloat16 and fp8 operands of elementwise operations are added, compared and clamped as unsigned integers."""
    builder = interpreter.interpreter_builder
    one = Handle(np.array([0x3F80], np.uint16), tl.bfloat16)
    if builder.create_fadd(one, one).data[0] == 0x4000:
        return False

    def wrap(name: str) -> None:
        original = getattr(Builder, name)

        def method(self: object, *args: object) -> object:
            *handles, operation = args
            if not _narrow(*handles) or operation in _ON_BITS:
                return original(self, *args)
            narrow = next(handle.dtype.scalar for handle in handles if _narrow(handle))
            widened = [
                Handle(to_float32(handle.data, handle.dtype.scalar), tl.float32) if _narrow(handle) else handle for handle in handles
            ]
            result = original(self, *widened, operation)
            if result.data.dtype == np.bool_:
                return result
            return Handle(from_float32(result.data.astype(np.float32), narrow), narrow)

        setattr(Builder, name, method)

    for name in ("unary_op", "binary_op", "ternary_op"):
        wrap(name)
    fma = Builder.create_fma

    def create_fma(self: object, x: object, y: object, z: object) -> object:
        if not _narrow(x, y, z):
            return fma(self, x, y, z)
        x32, y32, z32 = (to_float32(handle.data, handle.dtype.scalar) for handle in (x, y, z))
        return Handle(from_float32(x32 * y32 + z32, z.dtype.scalar), z.dtype.scalar)

    Builder.create_fma = create_fma
    return True


_ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift, np.where)


def fill_dot() -> bool:
    """tl.dot multiplies bfloat16 bit patterns; int8 goes through numpy's slow integer matmul (exact either way)."""
    builder = interpreter.interpreter_builder
    one = Handle(np.array([[0x3F80]], np.uint16), tl.bfloat16)
    zero = Handle(np.zeros((1, 1), np.float32), tl.float32)
    if builder.create_dot(one, one, zero, None, 0).data[0, 0] == 1.0:
        return False
    original = Builder.create_dot

    def dot(self: object, a: object, b: object, d: object, input_precision: object, max_num_imprecise_acc: object) -> object:
        if a.dtype.scalar == tl.int8 and b.dtype.scalar == tl.int8 and d.data.dtype == np.int32:
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))  # exact: far below 2**53
            return Handle(product.astype(np.int32) + d.data, d.dtype.scalar)
        if not _narrow(a, b) or d.data.dtype != np.float32:
            return original(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(to_float32(a.data, a.dtype.scalar), to_float32(b.data, b.dtype.scalar))
        return Handle(product + d.data, d.dtype.scalar)

    Builder.create_dot = dot
    return True


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(x.dtype), x)


_LIBDEVICE: dict[str, Callable[..., np.ndarray]] = {
    "round": _round_half_away,
    "rint": np.rint,
    "nearbyint": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "pow": np.power,
}
_LIBDEVICE_TAKES = ("fp32", "fp64", "int32")  # the last pow only, as its exponent


def fill_libdevice() -> bool:
    """libdevice functions get no semantic object inside the interpreter and have no implementation there. What they do not take on a GPU
    raises TypeError here."""
    import triton.language.extra.cuda.libdevice as cuda_libdevice
    from triton.language.extra import libdevice

    if getattr(cuda_libdevice.round, "moediff", False):
        return False

    def wrap(name: str, function: Callable[..., np.ndarray]) -> Callable[..., object]:
        def call(*args: object, _semantic: object = None) -> object:
            tensors = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
            dtype, *others = (tensor.dtype for tensor in tensors)
            if dtype.scalar.name not in _LIBDEVICE_TAKES[:2] or any(other.scalar.name not in _LIBDEVICE_TAKES for other in others):
                raise TypeError(f"libdevice.{name} takes fp32 and fp64, not {', '.join(tensor.dtype.scalar.name for tensor in tensors)}")
            data = function(*(tensor.handle.data for tensor in tensors)).astype(interpreter._get_np_dtype(dtype))
            shaped = max(tensors, key=lambda tensor: tensor.handle.data.size)
            return tl.core.tensor(Handle(data, dtype), shaped.type)

        call.moediff = True
        return call

    for name, function in _LIBDEVICE.items():
        wrapped = wrap(name, function)
        setattr(cuda_libdevice, name, wrapped)
        setattr(libdevice, name, wrapped)
    return True


def fill_core() -> bool:
    """Builtins that a kernel reaches as ``tl.core.sub`` are not given the interpreter's semantic; as ``tl.sub`` they are."""
    patch_lang = interpreter._patch_lang
    if getattr(patch_lang, "moediff", False) or _patches_core(patch_lang):
        return False

    def patch(fn: Callable[..., object]) -> object:
        scope = patch_lang(fn)
        if "core" in fn.__code__.co_names:
            interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        return scope

    patch.moediff = True
    interpreter._patch_lang = patch
    return True


def _patches_core(patch_lang: Callable[..., object]) -> bool:
    before = tl.core.sub
    scope = patch_lang(_reaches_core)
    try:
        return tl.core.sub is not before
    finally:
        scope.restore()


def _reaches_core() -> object:
    return tl.core.sub


def fill_members() -> bool:
    """``x.floor()`` and the other functions of tl.math as methods are not known to be builtins, and get no semantic."""
    found = False
    for name, function in vars(tl.math).items():
        member = vars(tl.tensor).get(name)
        if tl.core.is_builtin(function) and inspect.isfunction(member) and not tl.core.is_builtin(member):
            setattr(member, tl.core.TRITON_BUILTIN, True)
            found = True
    return found


def fill_silence() -> bool:
    """numpy warns of the infinities and NaN that a GPU makes in silence, those of masked lanes among them."""
    quiet = {"divide": "ignore", "over": "ignore", "invalid": "ignore"}
    return any(was != "ignore" for name, was in np.seterr(**quiet).items() if name in quiet)


GAPS: tuple[Callable[[], bool], ...] = (fill_casts, fill_arithmetic, fill_dot, fill_libdevice, fill_core, fill_members, fill_silence)


def fill() -> tuple[str, ...]:
    """Fill every gap that is present; the names of the functions that patched something."""
    return tuple(gap.__name__ for gap in GAPS if gap())
