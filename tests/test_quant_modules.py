from collections.abc import Iterator

import pytest
import torch
from torch import nn

import qat.nn as qnn
from qat import quant_modules
from qat.errors import ConfigError

ORIGINALS = {cls.__name__: cls for cls in qnn.QUANT_CLASSES}


class MyLinear(qnn.QuantLinear):
    pass


class Space:
    Block = nn.Linear


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    quant_modules.deactivate()
    assert _all_float()


def _all_float() -> bool:
    return all(getattr(nn, name) is cls for name, cls in ORIGINALS.items())


def test_initialize_swaps_what_is_built_until_deactivate() -> None:
    quant_modules.initialize()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(1))
    assert type(model[0]) is qnn.QuantConv2d and type(model[2]) is qnn.QuantAdaptiveAvgPool2d
    assert type(model[3]) is ORIGINALS["MaxPool2d"]
    swapped = {name for name, cls in ORIGINALS.items() if getattr(nn, name) is not cls}
    assert swapped == {name for name in ORIGINALS if not name.startswith(("MaxPool", "InstanceNorm"))}
    quant_modules.deactivate()
    assert _all_float() and type(nn.Linear(1, 1)) is ORIGINALS["Linear"]


def test_float_list_holds_for_each_call() -> None:
    quant_modules.initialize()
    quant_modules.initialize(float_module_list=["Linear"])
    assert nn.Linear is ORIGINALS["Linear"] and nn.Conv2d is qnn.QuantConv2d
    quant_modules.initialize(float_module_list=["Conv2d"])
    assert nn.Linear is qnn.QuantLinear and nn.Conv2d is ORIGINALS["Conv2d"]
    quant_modules.deactivate()
    assert _all_float()


def test_custom_map_wins_and_is_gone_with_the_next_call() -> None:
    custom = [(nn, "Linear", MyLinear), (Space, "Block", MyLinear)]
    quant_modules.initialize(["Linear"], custom)
    assert nn.Linear is MyLinear and Space.Block is MyLinear
    quant_modules.initialize()
    assert nn.Linear is qnn.QuantLinear and Space.Block is ORIGINALS["Linear"]


def test_deactivate_is_harmless_without_or_twice() -> None:
    quant_modules.deactivate()
    quant_modules.initialize()
    quant_modules.initialize()
    quant_modules.deactivate()
    quant_modules.deactivate()
    assert _all_float()


def test_nested_blocks_restore_their_surroundings() -> None:
    with quant_modules.enable(["Conv2d"]):
        with quant_modules.enable(["Linear"], [(Space, "Block", MyLinear)]):
            assert nn.Linear is ORIGINALS["Linear"] and nn.Conv2d is qnn.QuantConv2d and Space.Block is MyLinear
        assert nn.Linear is qnn.QuantLinear and nn.Conv2d is ORIGINALS["Conv2d"]
        assert Space.Block is ORIGINALS["Linear"]
    assert _all_float()


def test_block_inside_initialize_returns_to_it() -> None:
    quant_modules.initialize(["LSTM"])
    with quant_modules.enable():
        assert nn.LSTM is qnn.QuantLSTM
        quant_modules.deactivate()
        assert _all_float()
    assert nn.LSTM is ORIGINALS["LSTM"] and nn.Conv2d is qnn.QuantConv2d


def test_exception_inside_a_block_restores() -> None:
    with pytest.raises(RuntimeError, match="inside"), quant_modules.enable(), quant_modules.enable(["Linear"]):
        raise RuntimeError("inside")
    assert _all_float()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((["Conv2D"],), ConfigError, "Did you mean 'Conv2d'"),
        ((["ReLU"],), ConfigError, "Known names: Conv1d"),
        (("Linear",), ConfigError, "Use a list"),
        ((None, [(nn, "Linear")]), TypeError, "namespace, name, class"),
        ((None, [(nn, "Linear", MyLinear(1, 1))]), TypeError, "not a class"),
        ((None, [(nn, "Linaer", MyLinear)]), AttributeError, "'Linaer'"),
    ],
)
def test_wrong_arguments_are_sentences_and_change_nothing(arguments, error, message) -> None:
    quant_modules.initialize(["LSTM"])
    with pytest.raises(error, match=message):
        quant_modules.initialize(*arguments)
    assert nn.LSTM is ORIGINALS["LSTM"] and nn.Linear is qnn.QuantLinear


def test_a_model_built_swapped_trains_and_pickles_afterwards() -> None:
    with quant_modules.enable():
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        layer.input_quantizer.amax = 1.0
        layer.weight_quantizer.amax = torch.ones(layer.out_features)
    model(torch.randn(5, 3)).sum().backward()
    assert model[0].weight.grad is not None and isinstance(model[0], nn.Linear)
