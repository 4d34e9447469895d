"""GPU kernels that fake-quantize many weights at once; a program takes one row, which has one scale.

The table is int64, four numbers a row: addresses of the row and of its amax, where the row starts among all weights
laid end to end, and its length. Nothing in it changes from step to step, so it is sent to the GPU once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.fake_quant_triton_kernels import clamp, code_of, divide, scale_of
from qat.triton_launch import launch

COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _row(table_ptr, type_ptr, max_bound: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of the row's values, its place among all, its length, its scale and the scale's reciprocal."""
    entry = table_ptr + tl.program_id(0).to(tl.int64) * 4
    x_ptr = tl.load(entry).to(tl.pointer_type(type_ptr.dtype.element_ty))
    scale = scale_of(tl.abs(tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)))), max_bound)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return x_ptr, tl.load(entry + 2), tl.load(entry + 3).to(tl.int32), scale, inverse


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    table_ptr, type_ptr, y_ptr, min_bound: tl.constexpr, max_bound: tl.constexpr, columns: tl.constexpr
):
    x_ptr, place, length, scale, inverse = _row(table_ptr, type_ptr, max_bound)
    for start in range(0, length, columns):
        offsets = start + tl.arange(0, columns)
        mask = offsets < length
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = clamp(code_of(divide(x, scale, inverse, min_bound, max_bound)), min_bound, max_bound) * scale
        # A half-precision weight is rounded to its own type before it is cast to autocast's.
        y = y.to(type_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + place + offsets, y, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    table_ptr, type_ptr, grad_ptr, sums_ptr, min_bound: tl.constexpr, max_bound: tl.constexpr,
    learned: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Zero the gradients outside of the bounds, in place; with `learned`, the row's gradient to the scale."""
    x_ptr, place, length, scale, inverse = _row(table_ptr, type_ptr, max_bound)
    total = tl.zeros((columns,), tl.float32)
    for start in range(0, length, columns):
        offsets = start + tl.arange(0, columns)
        mask = offsets < length
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        ratio = divide(x, scale, inverse, min_bound, max_bound)
        code = code_of(ratio)
        clamped = clamp(code, min_bound, max_bound)
        inside = clamped == code
        if learned:
            grad = tl.load(grad_ptr + place + offsets, mask=mask, other=0.0).to(tl.float32)
            total += grad * tl.where(inside, code - ratio, clamped)
        tl.store(grad_ptr + place + offsets, tl.zeros_like(x).to(grad_ptr.dtype.element_ty), mask=mask & (inside == 0))
    if learned:
        tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@dataclass(frozen=True)
class Layout:
    """Where a group's rows are, and its parts when all weights are laid end to end.

    Attributes:
        table: int64, shape (rows, 4), on the weights' device.
        parts: (shape, strides, place of the first value) of each weight.
        size: values in all.
    """

    table: Tensor
    parts: tuple[tuple[Any, ...], ...]
    size: int


def make_layout(weights: Sequence[Tensor], amaxes: Sequence[Tensor]) -> Layout:
    """The layout of these tensors."""
    rows, parts, place = [], [], 0
    for weight, amax in zip(weights, amaxes, strict=True):
        row, length = torch.arange(weight.shape[0]), weight.stride(0)
        scale = row if amax.numel() > 1 else torch.zeros_like(row)
        rows.append(
            torch.stack(
                [
                    weight.data_ptr() + row * length * weight.element_size(),
                    amax.data_ptr() + scale * amax.element_size(),
                    place + row * length,
                    torch.full_like(row, length),
                ],
                1,
            )
        )
        parts.append((weight.shape, weight.stride(), place))
        place += weight.numel()
    return Layout(torch.cat(rows).to(weights[0].device), tuple(parts), place)


def _laid_out(layout: Layout, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Memory for all weights end to end, and its parts with the weights' shapes and strides; none is a view."""
    flat = torch.empty(layout.size, dtype=dtype, device=like.device)
    storage = flat.untyped_storage()
    return flat, [
        torch.empty(0, dtype=dtype, device=flat.device).set_(storage, place, shape, strides)
        for shape, strides, place in layout.parts
    ]


def forward(layout: Layout, like: Tensor, dtype: torch.dtype, min_bound: int, max_bound: int) -> list[Tensor]:
    """Every weight fake-quantized, in `dtype`, with its shape and strides; `like` has the weights' type and device."""
    flat, parts = _laid_out(layout, like, dtype)
    _launch(_forward_kernel, layout.table, like, flat, min_bound=min_bound, max_bound=max_bound)
    return parts


def backward(
    layout: Layout,
    like: Tensor,
    grads: Sequence[Tensor | None],
    min_bound: int,
    max_bound: int,
    learned: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients to the weights in the weights' type, zero where the code is beyond the bounds or none was given.

    Returns:
        They, and with `learned` each weight's gradients to the scale, float32, one a row.
    """
    flat, parts = _laid_out(layout, like, like.dtype)
    given = [(part, grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
    if len(given) < len(parts):
        flat.zero_()
    torch._foreach_copy_([part for part, _ in given], [grad for _, grad in given])
    table = layout.table
    sums = torch.empty(len(table) if learned else 0, dtype=torch.float32, device=flat.device)
    _launch(_backward_kernel, table, like, flat, sums, min_bound=min_bound, max_bound=max_bound, learned=learned)
    return parts, list(torch.split(sums, [shape[0] for shape, _, _ in layout.parts])) if learned else []


def _launch(kernel: Any, table: Tensor, like: Tensor, *arguments: Tensor, **constants: Any) -> None:
    launch(kernel, len(table), (table, like, *arguments), (), (), (*constants.values(), COLUMNS), 4)
