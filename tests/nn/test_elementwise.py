import copy
import pickle

import pytest
import torch
from torch import nn

import qat.nn as qnn
from qat.descriptor import QuantDescriptor
from qat.errors import NotCalibratedError
from qat.quantizer import QuantizerState, named_quantizers, set_quantizer_state
from quant_cases import assert_same, calibrate, reference

MODULES = [
    (qnn.QuantAdd, 1, lambda m, a, b: m(a, b), torch.add),
    (lambda: qnn.QuantAdd(quantize="both"), 2, lambda m, a, b: m(a, b), torch.add),
    (lambda: qnn.QuantConcat(dim=-1), 1, lambda m, a, b: m([a, b]), lambda a, b: torch.cat([a, b], -1)),
    (qnn.QuantMatmul, 2, lambda m, a, b: m(a, b), torch.matmul),
]


@pytest.mark.parametrize(("make", "count", "call", "operator"), MODULES)
def test_passthrough_errors_copies_and_compile(make, count, call, operator) -> None:
    module: nn.Module = make()
    a, b = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    assert len(list(named_quantizers(module))) == count
    with pytest.raises(NotCalibratedError):
        call(module, a, b)
    set_quantizer_state(module, QuantizerState.PASSTHROUGH)
    assert_same(call(module, a, b), operator(a, b))
    calibrate(module, *((a, b) if not isinstance(module, qnn.QuantConcat) else ([a, b],)))
    expected = call(module, a, b)
    assert not torch.equal(expected, operator(a, b))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(call(copied, a, b), expected)
    torch._dynamo.reset()
    assert_same(call(torch.compile(module, backend="eager", fullgraph=True), a, b), expected)


def test_add_quantizes_the_identity_only() -> None:
    add, a, b = qnn.QuantAdd(), torch.randn(2, 5), torch.randn(2, 5)
    calibrate(add, a, b)
    assert_same(add(a, b), a + reference(b))


def test_add_quantizes_both_with_a_scale_each() -> None:
    add, a, b = qnn.QuantAdd("both"), torch.randn(2, 5), 100 * torch.randn(2, 5)
    calibrate(add, a, b)
    assert_same(add(a, b), reference(a) + reference(b))


def test_add_refuses_another_choice() -> None:
    with pytest.raises(ValueError, match="'second'"):
        qnn.QuantAdd(quantize="first")


def test_concat_shares_one_scale_that_saw_every_input() -> None:
    concat, a, b, c = qnn.QuantConcat(1), torch.randn(2, 3, 4), 50 * torch.randn(2, 1, 4), torch.randn(2, 2, 4)
    calibrate(concat, [a, b, c])
    assert concat._input_quantizer.amax == b.abs().max()
    assert_same(concat((a, b, c)), reference(torch.cat([a, b, c], 1)))


def test_matmul_quantizes_both_factors() -> None:
    matmul, a, b = qnn.QuantMatmul(), torch.randn(2, 3, 5), 9 * torch.randn(2, 5, 4)
    calibrate(matmul, a, b)
    assert_same(matmul(a, b), reference(a) @ reference(b))


def test_matmul_takes_the_fixed_range_of_a_softmax() -> None:
    matmul = qnn.QuantMatmul(quant_desc_input=QuantDescriptor(amax=1.0))
    weights, values = torch.rand(4, 4).softmax(-1), 5 * torch.randn(4, 3)
    calibrate(matmul, weights, values)
    assert matmul._input_quantizer.amax == 1 and matmul._other_quantizer.amax == values.abs().max()
    scale = torch.tensor(1.0) / 127
    assert_same(matmul(weights, values), (weights / scale).round() * scale @ reference(values))
