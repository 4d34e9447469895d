"""Imported first in a process with TRITON_INTERPRET=1: it rounds a fused multiply-add twice, a GPU once."""

import numpy as np
from triton.runtime import interpreter


def _fma(self, x, y, z):
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = _fma
