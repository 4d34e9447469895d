"""The models of a comparison: FP32, FP16, PTQ by every method and QAT, each with its ONNX files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from qat.errors import QatError
from recipes.cells import FP16, FP32, ORT, TENSORRT
from recipes.classification import Classification
from recipes.config import RunConfig
from recipes.engines import half_file


@dataclass(frozen=True)
class Candidate:
    """One of the compared models.

    Attributes:
        name: one of `names`.
        module: float or fake-quantized, on the run's device.
        files: ONNX Runtime's and TensorRT's ONNX file; a missing one has its reason in `why_no_file`.
    """

    name: str
    module: nn.Module
    files: Mapping[str, Path]
    why_no_file: str = ""


class Half(nn.Module):
    """A copy of a float model in float16, with float32 inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits, both float32."""
        logits: Tensor = self.model(x.half())
        return logits.float()


def folder_of(config: RunConfig) -> Path:
    """Where a run's comparison lies."""
    return config.folder / "compare"


def names(config: RunConfig) -> list[str]:
    """The compared models; QAT is the run's first seed, the one that qat_finetune.py exports."""
    return [FP32, FP16, *(f"PTQ {m}" for m in config.quant.all_methods()), f"QAT seed {config.qat.seeds[0]}"]


def candidates(run: Classification) -> Iterator[Candidate]:
    """Run the stages that are missing (those done are reused), then export and hand out one model after the other."""
    config, folder = run.config, folder_of(run.config)
    model = run.float_model()
    quantized = copy.deepcopy(model)
    run.quantize(quantized)
    run.calibrate(quantized)
    tuned, _ = run.fine_tune(quantized, config.qat.seeds[0])
    whole = _candidate(run, FP32, model, folder / "float.onnx", half=True)
    for name, module, kind in ((FP32, model, ORT), (FP16, Half(model), TENSORRT)):
        files = dict.fromkeys((ORT, TENSORRT), whole.files[kind]) if kind in whole.files else {}
        yield Candidate(name, module, files, whole.why_no_file)
    half = config.tensorrt.remainder == "fp16"
    for method in config.quant.all_methods():
        file = config.ptq_file(method)
        yield _candidate(run, f"PTQ {method}", run.load_quantized(file), folder / f"ptq-{file.stem}.onnx", half)
    yield _candidate(run, names(config)[-1], tuned, folder / "qat.onnx", half)


def _candidate(run: Classification, name: str, module: nn.Module, path: Path, half: bool) -> Candidate:
    """Export; ONNX Runtime gets the float32 file, TensorRT its half-precision twin if `half`."""
    files: dict[str, Path] = {}
    try:
        run.export(module, path)
        files[ORT] = path
        files[TENSORRT] = half_file(path) if half else path
    except QatError as error:
        return Candidate(name, module, files, str(error))
    return Candidate(name, module, files)
