"""Imported first in a process with TRITON_INTERPRET=1: it rounds a fused multiply-add twice, a GPU once."""

import numpy as np
from triton.runtime import interpreter


def _fma(self, x, y, z):
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = _fma


_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """Triton 3.6 makes a loop's bound an int from an array of one element, which NumPy 2.5 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = _patch_with_index
