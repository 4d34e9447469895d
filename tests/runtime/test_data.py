import numpy as np
import pytest
from onnx import numpy_helper

from qat.errors import RunnerError
from qat.runtime.data import compare_outputs, holds_test_sets, load_pb, load_test_sets, random_inputs, verify


def _write(folder, **arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(np.asarray(array)).SerializeToString())


def test_test_sets_are_numbered_not_sorted_by_text(tmp_path) -> None:
    for index in (0, 2, 10):
        inputs = {f"input_{i}": np.full(2, i, np.float32) for i in range(11)}
        _write(tmp_path / f"test_data_set_{index}", **inputs, output_0=np.full(2, index, np.int64))
    names = [f"in{i}" for i in range(11)]
    sets = load_test_sets(tmp_path, names, ["out"])
    assert [item.name for item in sets] == ["test_data_set_0", "test_data_set_2", "test_data_set_10"]
    assert [int(sets[0].inputs[name][0]) for name in names] == list(range(11))
    assert sets[2].outputs["out"].dtype == np.int64


def test_the_folder_of_one_set_is_enough(tmp_path) -> None:
    _write(tmp_path, input_0=np.zeros(1, np.float16))
    assert holds_test_sets(tmp_path)
    (only,) = load_test_sets(tmp_path, ["x"], ["y"])
    assert only.inputs["x"].dtype == np.float16 and only.outputs == {}


def test_missing_and_broken_sets_are_explained(tmp_path) -> None:
    assert not holds_test_sets(tmp_path)
    with pytest.raises(RunnerError, match="neither"):
        load_test_sets(tmp_path, ["x"], ["y"])
    _write(tmp_path, input_0=np.zeros(1))
    with pytest.raises(RunnerError, match="has 1 inputs"):
        load_test_sets(tmp_path, ["x", "z"], ["y"])
    (tmp_path / "input_0.pb").write_bytes(b"\xff\xff")
    with pytest.raises(RunnerError, match=r"input_0\.pb"):
        load_pb(tmp_path / "input_0.pb")
    with pytest.raises(RunnerError, match="no tensor file"):
        load_pb(tmp_path / "input_7.pb")


def test_differences_are_counted() -> None:
    want = {"y": np.array([1.0, 2.0, np.nan], np.float32)}
    assert compare_outputs({"y": np.array([1.0, 2.0001, np.nan], np.float32)}, want, rtol=1e-3, atol=0) == []
    (problem,) = compare_outputs({"y": np.array([1.0, 3.0, 5.0], np.float32)}, want, rtol=1e-3, atol=0)
    assert "2 of 3" in problem
    (problem,) = compare_outputs({"y": np.zeros((3, 1))}, want, rtol=1, atol=1)
    assert "shape" in problem


class _Identity:
    input_names = ["x"]  # noqa: RUF012
    output_names = ["y"]  # noqa: RUF012

    def run(self, inputs):
        return {"y": inputs["x"]}


def test_verify_runs_every_set(tmp_path) -> None:
    _write(tmp_path / "test_data_set_0", input_0=np.ones(2, np.float32), output_0=np.ones(2, np.float32))
    _write(tmp_path / "test_data_set_1", input_0=np.ones(2, np.float32), output_0=np.zeros(2, np.float32))
    found = verify(_Identity(), load_test_sets(tmp_path, ["x"], ["y"]))
    assert found["test_data_set_0"] == [] and len(found["test_data_set_1"]) == 1


def test_random_inputs_are_valid_indices_and_repeatable() -> None:
    shapes, types = {"x": (4, 2), "ids": (4,)}, {"x": "float16", "ids": "int64"}
    first, second = random_inputs(shapes, types), random_inputs(shapes, types)
    np.testing.assert_array_equal(first["x"], second["x"])
    assert first["x"].dtype == np.float16 and not first["ids"].any() and first["x"].std() > 0
