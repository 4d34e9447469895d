"""Make the checkpoints of tests/test_moving_in.py with pytorch-quantization and Model Optimizer themselves, on a CPU.

    python benchmarks/moving_in_reference.py --source TensorRT/tools/pytorch-quantization
    python benchmarks/moving_in_reference.py --model-optimizer             # in an environment with nvidia-modelopt

The names that pytorch-quantization makes public are listed too, for the guide's table.
`--source` is that folder of NVIDIA's TensorRT repository (2.2.1 was used). Its CUDA extension is not built: what needs
it (loading a checkpoint, MSE calibration, FP8) is not called. Each case holds the state dict after calibration or
training, an input and the output there.
"""

from __future__ import annotations

import argparse
import ast
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from moving_in_networks import NETWORKS

from qat.files import atomic_write

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "pytorch_quantization.pt"
NAMES = OUTPUT.with_name("pytorch_quantization_names.txt")
WITH_MEMBERS = ("TensorQuantizer", "ScaledQuantDescriptor", "HistogramCalibrator", "MaxCalibrator", "QuantMixin")
"""Classes whose methods and properties a user's script calls."""


def load_library(source: str) -> Any:
    """The package `pytorch_quantization` of a source folder, without its CUDA extension."""
    version = types.ModuleType("pytorch_quantization.version")
    vars(version)["__version__"] = (Path(source) / "VERSION").read_text().strip()
    sys.modules |= {version.__name__: version, "pytorch_quantization.cuda_ext": types.ModuleType("cuda_ext")}
    sys.path.insert(0, source)
    from pytorch_quantization import nn as quant_nn
    from pytorch_quantization import quant_modules, tensor_quant

    return types.SimpleNamespace(nn=quant_nn, modules=quant_modules, desc=tensor_quant, version=version.__version__)


def public_names(source: str) -> list[str]:
    """Names that its modules define, and the members of the classes that scripts call."""
    package = Path(source) / "pytorch_quantization"
    names = set()
    for path in package.rglob("*.py"):
        if path.parent.name == "_functions":
            continue
        for node in ast.parse(path.read_text()).body:
            names |= set(_defined(node))
            if isinstance(node, ast.ClassDef) and node.name in WITH_MEMBERS:
                names |= {f"{node.name}.{name}" for member in node.body for name in _defined(member)}
    return sorted(names)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        found = [node.name]
    elif isinstance(node, ast.Assign):
        found = [target.id for target in node.targets if isinstance(target, ast.Name)]
    else:
        found = []
    return [name for name in found if not name.startswith("_")]


def calibrate(library: Any, model: nn.Module, x: Tensor, **method: Any) -> None:
    """The loop of its user guide: collect, load, quantize."""
    quantizers = [module for module in model.modules() if isinstance(module, library.nn.TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for part in x.split(2):
            model(part)
    for quantizer in quantizers:
        histogram = type(quantizer._calibrator).__name__ == "HistogramCalibrator"
        quantizer.load_calib_amax(**method if histogram else {})
        quantizer.enable_quant()
        quantizer.disable_calib()


def train(model: nn.Module, x: Tensor) -> None:
    """A few steps of QAT."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for part in x.split(2):
        optimizer.zero_grad()
        output = model(part)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()


def make_case(library: Any, build: Callable[[], tuple[nn.Module, Tensor]], kind: str) -> dict[str, Any]:
    """State dict, input and output of one network calibrated or trained in one way."""
    torch.manual_seed(0)
    histogram = kind in ("entropy", "percentile")
    learned = kind == "learned"
    descriptor = library.desc.QuantDescriptor(
        calib_method="histogram" if histogram else "max", learn_amax=learned, amax=2.5 if learned else None
    )
    classes = [library.nn.QuantConv2d, library.nn.QuantLinear]
    for quant_class in classes:
        quant_class.set_default_quant_desc_input(descriptor)
    library.modules.initialize()
    try:
        model, x = build()
    finally:
        library.modules.deactivate()
    calibrate(library, model, x, **({"method": kind} if histogram else {}))
    if kind in ("qat", "learned"):
        train(model, x)
    model.eval()
    with torch.no_grad():
        output = model(x)
    tensors = output if isinstance(output, tuple) else (output,)
    return {"state_dict": dict(model.state_dict()), "input": x, "output": tensors[0]}


def write_model_optimizer() -> None:
    """Write what INT8_DEFAULT_CFG makes of the convolutional network."""
    import modelopt
    from modelopt.torch import quantization as mtq

    torch.manual_seed(0)
    model, x = NETWORKS["convnet"]()
    model = mtq.quantize(model.eval(), mtq.INT8_DEFAULT_CFG, lambda module: module(x))
    with torch.no_grad():
        case = {"state_dict": dict(model.state_dict()), "input": x, "output": model(x)}
    with atomic_write(OUTPUT.with_name("model_optimizer.pt")) as temporary:
        torch.save({"version": modelopt.__version__, "cases": {"convnet": case}}, temporary)


def main() -> None:
    """Write the files in tests/data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--source", metavar="FOLDER", help="tools/pytorch-quantization")
    source.add_argument("--model-optimizer", action="store_true", help="Model Optimizer's checkpoint instead")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.model_optimizer:
        write_model_optimizer()
    else:
        write_pytorch_quantization(options.source)


def write_pytorch_quantization(source: str) -> None:
    """Write its checkpoints and its names."""
    library = load_library(source)
    cases = {f"{name}-max": make_case(library, build, "max") for name, build in NETWORKS.items()}
    for kind in ("entropy", "percentile", "qat", "learned"):
        cases[f"convnet-{kind}"] = make_case(library, NETWORKS["convnet"], kind)
    with atomic_write(OUTPUT) as temporary:
        torch.save({"version": library.version, "cases": cases}, temporary)
    names = public_names(source)
    with atomic_write(NAMES) as temporary:
        temporary.write_text("\n".join(names) + "\n")
    print(f"{NAMES.name}: {len(names)} names")
    print(f"{OUTPUT.name}: {len(cases)} cases, {OUTPUT.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
