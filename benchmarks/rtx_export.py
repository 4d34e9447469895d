"""Place quantizers in one network, calibrate and export it: `python rtx_export.py NETWORK PLACEMENT PRECISION FILE`.

placement_rtx.py starts it in a process of its own; "modelopt" needs neither qat nor its dependencies, so it runs in the
environment that has Model Optimizer. The last line on stdout is a JSON object with the versions that made the file.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rtx_networks import build_network

PACKAGES = ("torch", "torchvision", "segmentation-models-pytorch", "onnx", "onnxscript", "nvidia-modelopt")


def export_ours(model: Any, batches: list[Any], precision: str, path: Path) -> None:
    """`qat.prepare`: placement by tracing."""
    import qat

    qat.prepare(model, batches[0])
    _calibrate_and_export(model, batches, precision, path)


def export_modules(model: Any, batches: list[Any], precision: str, path: Path) -> None:
    """`qat.quantize_`: input and weight of every convolution and linear layer."""
    import qat

    qat.quantize_(model)
    _calibrate_and_export(model, batches, precision, path)


def _calibrate_and_export(model: Any, batches: list[Any], precision: str, path: Path) -> None:
    import qat

    qat.calibrate(model, batches, progress=False)
    qat.export(model, batches[0], path, precision=precision, dynamic_batch=False, verify=False)


def export_modelopt(model: Any, batches: list[Any], precision: str, path: Path) -> None:
    """Model Optimizer's INT8 default and the export helper of its own example, with that helper's defaults.

    torch's fast path of multi-head attention is off: with it the helper (0.47) cannot export torchvision's ViT:
    "Exporting the operator 'aten::_native_multi_head_attention' to ONNX opset version 20 is not supported".
    """
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch._deploy.utils import OnnxBytes, get_onnx_bytes_and_metadata

    torch.backends.mha.set_fastpath_enabled(False)

    def calibrate(quantized: Any) -> None:
        for batch in batches:
            quantized(batch)

    model = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, calibrate)
    data, _ = get_onnx_bytes_and_metadata(model, (batches[0],), model_name=path.stem, weights_dtype=precision)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        OnnxBytes.from_bytes(data).write_to_disk(folder)
        (Path(folder) / path.name).replace(path)


EXPORTERS = {"traced": export_ours, "modules": export_modules, "modelopt": export_modelopt}


def main(network: str, placement: str, precision: str, path: str) -> None:
    """Write the file and print the versions."""
    warnings.simplefilter("ignore")
    model, batches = build_network(network)
    EXPORTERS[placement](model, batches, precision, Path(path))
    print(json.dumps({name: found for name in PACKAGES if (found := _version(name))}))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
