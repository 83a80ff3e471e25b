"""Launches Triton kernels from JAX: on the GPU through jax-triton, or, with TRITON_INTERPRET=1, in Triton's interpreter on the CPU.

Import this module before triton: it points Triton at the assembler of JAX's CUDA wheel, which is the one that loads what jax-triton
emits, and may be older than Triton's own.
"""

import os
import warnings

import jax
import numpy as np

from moejax_kernels import gpu

if ptxas := gpu.find_ptxas():
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        os.environ.setdefault(variable, ptxas)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c rounds once; Triton 3.9 warns where nobody has said so


def launch(kernel, *operands, out_type, grid, num_warps: int = 4, num_stages: int = 2, zeroed: tuple[int, ...] = (), **constants):
    """One launch of a Triton kernel: one custom call in the compiled program.

    Args:
      kernel: function decorated with `triton.jit`; its parameters are pointers of the operands, numbers among the operands,
        pointers of the outputs, then constants by name.
      operands: arrays and Python numbers, in the order of the parameters. Arrays are contiguous, last dim fastest.
      out_type: sequence of `jax.ShapeDtypeStruct`.
      grid: up to three sizes.
      zeroed: places in `out_type` that hold zeros when the kernel starts; the others hold anything (NaN in the interpreter).
      constants: values of the kernel's `tl.constexpr` parameters.

    Returns:
      List of arrays as in `out_type`.
    """
    out_type = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in out_type]
    grid = grid if isinstance(grid, tuple) else (grid,)
    if gpu.interpreted():
        return _interpret(kernel, operands, out_type, grid, zeroed, constants)
    import jax_triton

    with warnings.catch_warnings():
        # It asks for a Ref that was zeroed beforehand: one more launch, where this is a memset inside the call.
        warnings.filterwarnings("ignore", message="zeroed_outputs is deprecated", category=DeprecationWarning)
        return jax_triton.triton_call(
            *operands,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            name=kernel.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            zeroed_outputs=zeroed,
            **constants,
        )


def _interpret(kernel, operands, out_type, grid, zeroed, constants):
    is_array = [hasattr(operand, "shape") for operand in operands]
    numbers = [operand for operand, array in zip(operands, is_array, strict=True) if not array]

    def run(*arrays):
        arrays, rest = iter(arrays), iter(numbers)
        inputs = [HostArray(np.asarray(next(arrays))) if array else next(rest) for array in is_array]
        outputs = [HostArray(_fresh(like, zero=i in zeroed)) for i, like in enumerate(out_type)]
        kernel[grid](*inputs, *outputs, **constants)
        return [output.array for output in outputs]

    arrays = [operand for operand, array in zip(operands, is_array, strict=True) if array]
    return list(jax.pure_callback(run, out_type, *arrays, vmap_method="sequential"))


def _fresh(like, *, zero: bool) -> np.ndarray:
    """Memory as a kernel finds it: poisoned where it must not be relied on."""
    if zero:
        return np.zeros(like.shape, like.dtype)
    floating = jax.numpy.issubdtype(like.dtype, jax.numpy.floating)  # bfloat16 is none of numpy's own
    return np.full(like.shape, np.nan if floating else np.iinfo(like.dtype).min, like.dtype)


class HostArray:
    """A numpy array with the few methods of a torch tensor that Triton's interpreter asks for."""

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype.name}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "HostArray":
        return self

    def cpu(self) -> "HostArray":
        return self

    def copy_(self, other) -> None:
        """Nothing to copy: the interpreter works on the array's own memory."""

    def new_empty(self, *args, **kwargs) -> "HostArray":
        return HostArray.__new__(HostArray)

    def set_(self, storage: "HostArray", offset, size, stride) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)
