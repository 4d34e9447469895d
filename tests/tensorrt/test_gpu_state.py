import pytest

from qat.tensorrt import gpu_state


def test_nvidia_smi_line() -> None:
    line = "NVIDIA L4, 580.1, 2040 MHz, 2040 MHz, 6251 MHz, 70.00 W, 72.00 W, 61, 0x0000000000000000\n"
    state = gpu_state.parse_state(line)
    assert state["name"] == "NVIDIA L4" and state["clocks.sm"] == "2040 MHz" and state["temperature.gpu"] == "61"
    assert gpu_state.parse_state("No devices were found") is None


def test_no_gpu_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: None)
    assert gpu_state.gpu_state() is None


@pytest.mark.gpu
def test_a_gpu_reports_its_clocks() -> None:
    assert "MHz" in gpu_state.gpu_state()["clocks.sm"]
