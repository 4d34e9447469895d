"""Weights of a model fake-quantized together on a GPU: one launch forward and one backward for millions of values.

The first quantizer asked in a forward pass computes for its whole group; the others hand out what is there. A result is
handed out once, so every forward pass of a model sees the weights as they are, also where they were changed behind
autograd's back (`weight.data`, CUDA graphs). Between two parts of one pass it does not: a part that is called by itself
after such a change gets what the part before it computed. A group is at most GROUP_SIZE values, so that in a backward
pass DDP can send the gradients of one group while those of the layers before are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.fake_quant_reference import amax_gradient, gpu_kernels, input_gradient, lsq_gradient

GROUP_SIZE = 2**23
"""Values in one group; more than one weight only where they fit."""


class _Member:
    """A weight with its quantizer's amax: what one result depends on, held weakly."""

    def __init__(self, weight: Tensor, amax: Tensor, bounds: tuple[int, int]) -> None:
        self.weight, self.amax, self.bounds = weakref.ref(weight), weakref.ref(amax), bounds
        self.group: _Group
        self.result: Tensor | None = None
        self.key: tuple[Any, ...] = ()


class _Group:
    """Members whose weights have the type, device and bounds of the first."""

    def __init__(self, like: Tensor, bounds: tuple[int, int]) -> None:
        self.kind = (like.dtype, like.device, bounds)
        self.members: list[_Member] = []
        self.size = 0
        self.signature: list[Any] = []
        self.layout: Any = None


class WeightCache:
    """Results for the weights of one model, by quantizer. A copy or a pickle of it is empty."""

    def __init__(self) -> None:
        self._members: weakref.WeakKeyDictionary[nn.Module, _Member] = weakref.WeakKeyDictionary()
        self._groups: list[_Group] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return memo.setdefault(id(self), WeightCache())  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()

    def get(
        self, quantizer: nn.Module, weight: Tensor, amax: Tensor, axis: int | None, bounds: tuple[int, int]
    ) -> Tensor | None:
        """The fake-quantized weight; under autocast in autocast's type, to which its layer would cast it.

        Args:
            quantizer: whose weight it is.
            weight: a parameter.
            amax: float32, one element, or one for each index of the weight's dimension 0; its magnitude counts.
            axis: of the scales.
            bounds: smallest and largest code.

        Returns:
            The result, or None where `can_group` says no.
        """
        member = self._members.get(quantizer)
        if member is None or member.weight() is not weight or member.amax() is not amax or member.bounds != bounds:
            member = None
        if member is None or member.result is None or member.key != _key(weight, amax):
            if not can_group(weight, amax, axis):
                return None
            member = member or self._join(quantizer, weight, amax, bounds)
            self._compute(member.group)
        result, member.result = member.result, None
        assert result is not None
        return result

    def _join(self, quantizer: nn.Module, weight: Tensor, amax: Tensor, bounds: tuple[int, int]) -> _Member:
        member = self._members[quantizer] = _Member(weight, amax, bounds)
        kind = (weight.dtype, weight.device, bounds)
        last = next((g for g in reversed(self._groups) if g.kind == kind), None)
        if last is None or last.size + weight.numel() > GROUP_SIZE:
            last = _Group(weight, bounds)
            self._groups.append(last)
        last.members.append(member)
        last.size += weight.numel()
        member.group = last
        return member

    def _compute(self, group: _Group) -> None:
        signature = _signature(group.members)
        if signature != group.signature:
            self._clean(group)
            group.signature, group.layout = _signature(group.members), None
        weights, amaxes = [m.weight() for m in group.members], [m.amax() for m in group.members]
        dtype = weights[0].dtype  # type: ignore[union-attr]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        results = _Weights.apply(group, dtype, len(weights), *weights, *amaxes)
        for member, weight, amax, result in zip(group.members, weights, amaxes, results, strict=True):
            member.result, member.key = result, _key(weight, amax)

    def _clean(self, group: _Group) -> None:
        """Drop members that are gone, were replaced, or can no longer be in a group."""
        known = set(self._members.values())
        group.members = [m for m in group.members if m in known and can_group(m.weight(), m.amax())]
        group.size = sum(w.numel() for m in group.members if (w := m.weight()) is not None)


def _signature(members: Sequence[_Member]) -> list[Any]:
    """What the layout of a group follows from; asked in every step."""
    found: list[Any] = []
    for member in members:
        weight, amax = member.weight(), member.amax()
        if weight is None or amax is None:
            found.append(None)
        else:
            found += (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, amax.data_ptr())
    return found


def on_gpu(x: Tensor) -> bool:
    """Where a GPU runs the kernels."""
    return x.is_cuda


def can_group(weight: Tensor | None, amax: Tensor | None, axis: int | None = 0) -> bool:
    """A float32 or half parameter on a GPU, dense, its channels along dimension 0 of its memory, or one scale."""
    if type(weight) is not nn.Parameter or amax is None or not on_gpu(weight) or axis not in (0, None):
        return False
    return (
        weight.dim() > 1
        and weight.numel() > 0
        and weight.stride(0) * weight.shape[0] == weight.numel()
        and gpu_kernels(weight, amax) is not None
    )


def _key(weight: Any, amax: Any) -> tuple[Any, ...]:
    """What a result depends on besides the values themselves."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    grads = torch.is_grad_enabled() and (weight.requires_grad, amax.requires_grad)
    return weight._version, amax._version, weight.data_ptr(), amax.data_ptr(), weight.dtype, cast, grads


class _Weights(torch.autograd.Function):
    """Weights and their amax in, fake-quantized weights out.

    Nothing is saved by autograd: graphs of several forward passes may share a result, and each has its backward.
    """

    @staticmethod
    def forward(ctx: Any, group: _Group, dtype: torch.dtype, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        from qat import fake_quant_triton_weights as kernels

        weights, amaxes = tensors[:count], tensors[count:]
        bounds = group.kind[2]
        if group.layout is None:
            group.layout = kernels.make_layout(weights, amaxes)
        ctx.set_materialize_grads(False)  # a layer that took no part gets no gradient
        ctx.count, ctx.layout, ctx.bounds = count, group.layout, bounds
        ctx.tensors, ctx.versions = tensors, [t._version for t in tensors]
        return tuple(kernels.forward(group.layout, weights[0], dtype, *bounds))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from qat import fake_quant_triton_weights as kernels

        weights, amaxes, (low, high) = ctx.tensors[: ctx.count], ctx.tensors[ctx.count :], ctx.bounds
        changed = [t._version != version for t, version in zip(ctx.tensors, ctx.versions, strict=True)]
        if any(grad is not None and hit for grad, hit in zip([*grads, *grads], changed, strict=True)):
            raise RuntimeError(
                "a weight or its amax was changed in place between the forward and the backward pass: its gradient "
                "can no longer be computed. Run the forward pass again, or change it after the backward pass."
            )
        learned = any(ctx.needs_input_grad[3 + ctx.count :])
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable(grads, weights, amaxes, low, high, learned)
        masked, sums = kernels.backward(ctx.layout, weights[0], grads, low, high, learned)
        grad_amaxes: list[Tensor | None] = [None] * ctx.count
        if learned:
            totals = [s if a.numel() > 1 else s.sum() for s, a in zip(sums, amaxes, strict=True)]
            grad_amaxes = [
                None if grad is None else lsq_gradient(total, w, a, 0 if a.numel() > 1 else None, low, high) * a.sign()
                for grad, total, w, a in zip(grads, totals, weights, amaxes, strict=True)
            ]
        given = [None if grad is None else new for grad, new in zip(grads, masked, strict=True)]
        return None, None, None, *given, *grad_amaxes


def _differentiable(
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    low: int,
    high: int,
    learned: bool,
) -> list[Tensor | None]:
    """The gradients to all weights, then to all amax, by torch: the backward pass is itself differentiated."""
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for grad, weight, amax in zip(grads, weights, amaxes, strict=True):
        if grad is None:
            found.append((None, None))
            continue
        rest = (weight, amax.abs(), 0 if amax.numel() > 1 else None, low, high)
        slope = amax_gradient(grad, *rest) * amax.sign() if learned else None
        found.append((input_gradient(grad, *rest).to(weight.dtype), slope))
    return [weight for weight, _ in found] + [amax for _, amax in found]
