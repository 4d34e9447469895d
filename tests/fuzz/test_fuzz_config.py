"""Random YAML through the configuration loader: a configuration, or a ConfigError, and never anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import qat
from qat.errors import ConfigError, DescriptorError
from recipes.config import RunConfig, build_parser, known_keys, parse

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "configs" / name for name in ("digits.yaml", "resnet50.yaml", "cifar10_efficientnet.yaml")]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["max", "entropy", "digits", "1e-3", "auto", "nan", "!x", "percentile=99", "-1", "${x}", "{}"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3)),
    max_leaves=6,
)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        inner = values.get(group)
        values[group] = values = inner if isinstance(inner, dict) else {}
    values[last] = value


def _load(text: str, folder: Path) -> None:
    path = folder / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config, _ = parse(build_parser(""), ["--config", str(path)])
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, RunConfig)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@settings(max_examples=60)
@given(st.data())
def test_random_values_in_a_configuration(folder: Path, data: st.DataObject) -> None:
    values = yaml.safe_load(data.draw(st.sampled_from(CONFIGS)).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        _set(values, data.draw(st.sampled_from(known_keys())), data.draw(VALUES))
    _load(yaml.safe_dump(values, allow_unicode=True), folder)


@settings(max_examples=40)
@given(st.one_of(st.text(max_size=60), st.text(alphabet="abc:-[]{}!&*#|>'\" \n\t%@,?", max_size=40)))
def test_random_text_as_a_configuration(folder: Path, text: str) -> None:
    _load(text, folder)
    try:
        qat.QuantDescriptor.from_yaml(text)
    except DescriptorError as error:
        assert str(error)


@settings(max_examples=60)
@given(
    st.dictionaries(st.one_of(st.text(max_size=5), st.sampled_from(["num_bits", "axis", "amax"])), VALUES, max_size=4)
)
def test_random_descriptors(values: dict[str, Any]) -> None:
    try:
        descriptor = qat.QuantDescriptor.from_dict(values)
    except DescriptorError as error:
        assert str(error)
    else:
        assert qat.QuantDescriptor.from_yaml(descriptor.to_yaml()) == descriptor
