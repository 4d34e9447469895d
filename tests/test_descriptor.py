import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qat.descriptor import QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL, QuantDescriptor
from qat.errors import DescriptorError

positive = st.floats(min_value=1e-6, max_value=1e6)


@given(
    st.builds(
        QuantDescriptor,
        num_bits=st.integers(2, 8),
        axis=st.one_of(st.none(), st.integers(-3, 3)),
        narrow_range=st.booleans(),
        amax=st.one_of(st.none(), positive),
        learn_amax=st.booleans(),
    )
)
def test_round_trips_through_dict_and_yaml(descriptor: QuantDescriptor) -> None:
    assert QuantDescriptor.from_dict(descriptor.to_dict()) == descriptor
    assert QuantDescriptor.from_yaml(descriptor.to_yaml()) == descriptor


def test_tuple_amax_round_trips() -> None:
    descriptor = QuantDescriptor(axis=0, amax=(1.0, 2.5))
    assert QuantDescriptor.from_yaml(descriptor.to_yaml()) == descriptor


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"unsigned": True}, ["unsigned=True", "UINT8", "unsigned=False"]),
        ({"num_bits": 16}, ["num_bits=16", "num_bits=8"]),
        ({"num_bits": True}, ["num_bits=True", "integer"]),
        ({"axis": 0, "calib_method": "histogram"}, ["axis=0", "histogram", "axis=None"]),
        ({"axis": (0,)}, ["axis=(0,)", "one dimension"]),
        ({"amax": -1.0}, ["amax=-1.0", "positive"]),
        ({"amax": float("nan")}, ["amax=nan", "positive and finite"]),
        ({"amax": (1.0, 2.0)}, ["2 values", "axis"]),
        ({"amax": "big"}, ["amax='big'", "not a number"]),
        ({"narrow_range": 1}, ["narrow_range=1", "boolean"]),
        ({"calib_method": 3}, ["calib_method=3"]),
    ],
)
def test_invalid_fields_are_sentences(values: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(DescriptorError) as error:
        QuantDescriptor(**values)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(error.value)


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(DescriptorError, match="Did you mean 'num_bits'"):
        QuantDescriptor.from_dict({"num_bit": 8})
    with pytest.raises(DescriptorError, match="mapping"):
        QuantDescriptor.from_yaml("- 1\n- 2\n")


def test_frozen_and_bounds() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantDescriptor().num_bits = 4  # type: ignore[misc]
    assert (QuantDescriptor().min_bound, QuantDescriptor().max_bound) == (-128, 127)
    assert QUANT_DESC_8BIT_WEIGHT_PER_CHANNEL.min_bound == -127
    assert QuantDescriptor(num_bits=4).max_bound == 7
