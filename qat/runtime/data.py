"""ONNX test data sets (`test_data_set_*/input_0.pb`, compared with `output_0.pb`), and random inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat.errors import RunnerError
from qat.files import atomic_write
from qat.runtime.runner import Array, Arrays, Runner


@dataclass(frozen=True)
class TestSet:
    """One ONNX test data set: inputs, and the outputs that are expected."""

    __test__ = False

    name: str
    inputs: Arrays
    outputs: Arrays


def load_pb(path: str | Path) -> Array:
    """An array from a serialized ONNX TensorProto.

    Raises:
        RunnerError: missing or not a TensorProto.
    """
    from onnx import TensorProto, numpy_helper

    file = Path(path)
    if not file.is_file():
        raise RunnerError(f"There is no tensor file '{file}'.")
    try:
        tensor = TensorProto.FromString(file.read_bytes())
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise RunnerError(f"'{file}' is not a serialized ONNX tensor: {error}.") from error


def save_test_set(folder: str | Path, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Write `input_0.pb`, ... and `output_0.pb`, ... in the order of the mappings, each named and each atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    from onnx import numpy_helper

    for kind, arrays in (("input", inputs), ("output", outputs)):
        for number, (name, array) in enumerate(arrays.items()):
            with atomic_write(Path(folder) / f"{kind}_{number}.pb") as temporary:
                temporary.write_bytes(numpy_helper.from_array(np.ascontiguousarray(array), name).SerializeToString())


def load_test_sets(folder: str | Path, input_names: Sequence[str], output_names: Sequence[str]) -> list[TestSet]:
    """Every `test_data_set_*` of a folder, or the folder itself if it holds `input_0.pb`.

    File numbers follow the order of the model's inputs and outputs. Outputs may be absent.

    Raises:
        RunnerError: no test set, or a set with too few or too many inputs.
    """
    root = Path(folder)
    folders = _set_folders(root)
    if not folders:
        raise RunnerError(f"'{root}' holds neither input_0.pb nor a folder test_data_set_0.")
    sets = []
    for path in folders:
        inputs = [load_pb(file) for file in sorted(path.glob("input_*.pb"), key=_number)]
        outputs = [load_pb(file) for file in sorted(path.glob("output_*.pb"), key=_number)]
        if len(inputs) != len(input_names) or len(outputs) not in (0, len(output_names)):
            raise RunnerError(
                f"'{path}' has {len(inputs)} inputs and {len(outputs)} outputs; the model takes "
                f"{list(input_names)} and returns {list(output_names)}."
            )
        expected = dict(zip(output_names, outputs, strict=False))
        sets.append(TestSet(path.name, dict(zip(input_names, inputs, strict=True)), expected))
    return sets


def holds_test_sets(folder: str | Path) -> bool:
    """True for a folder that `load_test_sets` reads."""
    return bool(_set_folders(Path(folder)))


def _set_folders(root: Path) -> list[Path]:
    return [root] if (root / "input_0.pb").is_file() else sorted(root.glob("test_data_set_*"), key=_number)


def _number(path: Path) -> int:
    found = re.search(r"_(\d+)(?:\.pb)?$", path.name)
    return int(found.group(1)) if found else -1


def compare_outputs(actual: Mapping[str, Array], expected: Mapping[str, Array], rtol: float, atol: float) -> list[str]:
    """Sentences for every output that differs; empty where all agree within atol + rtol * |expected|."""
    problems = []
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape:
            problems.append(f"output '{name}' has shape {got.shape}, expected {want.shape}.")
            continue
        a, b = got.astype(np.float64), want.astype(np.float64)
        wrong = ~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if wrong.any():
            problems.append(
                f"output '{name}': {int(wrong.sum())} of {wrong.size} values differ, by up to "
                f"{float(np.nanmax(np.abs(a - b))):.3g}."
            )
    return problems


def verify(runner: Runner, sets: Sequence[TestSet], rtol: float = 1e-3, atol: float = 1e-3) -> dict[str, list[str]]:
    """Run every test set and compare: name of the set -> differences."""
    return {item.name: compare_outputs(runner.run(item.inputs), item.outputs, rtol, atol) for item in sets}


def random_inputs(shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str], seed: int = 0) -> Arrays:
    """Standard normal floats, and zeros for integer and boolean inputs (valid as any index or mask)."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, shape in shapes.items():
        dtype = np.dtype(dtypes[name])
        values = rng.standard_normal(tuple(shape)) if dtype.kind == "f" else np.zeros(tuple(shape))
        arrays[name] = values.astype(dtype)
    return arrays
