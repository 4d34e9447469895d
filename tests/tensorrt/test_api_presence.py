"""Every TensorRT name that the package uses exists in the bindings of 10.16 and 11.4.

The bindings' wheels hold no libraries; stubs with the C symbols that they import make them importable without a GPU.
"""

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qat.tensorrt
from qat.errors import EngineError
from qat.tensorrt.api import load_library

VERSIONS = ("10.16.1.11", "11.4.0.106")
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
# Variables of the package that hold a TensorRT object, by the name they always have.
OBJECTS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "error": "ParserError",
    "trt_profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "mine": "ITimingCache",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "trt_engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "context": "IExecutionContext",
}
# The same variables where they hold something else: an exception, a path.
NOT_TENSORRT = {("error", "name"), ("engine", "resolve")}
# Used only where Library.is_rtx is true.
RTX_ONLY = {
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "EngineValidity",
    "EngineInvalidityDiagnostics",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "Runtime.engine_header_size",
    "Runtime.get_engine_validity",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
}
OVERRIDDEN = {
    "ILogger.log",
    "IProgressMonitor.phase_start",
    "IProgressMonitor.step_complete",
    "IProgressMonitor.phase_finish",
    "IProfiler.report_layer_time",
}


def _name(node: ast.expr) -> str:
    """`self.context` and `context` are both "context"."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def used_names() -> set[str]:
    """Dotted names of TensorRT in the package's source: `BuilderFlag.TF32`, `IBuilderConfig.set_flag`."""
    found = set(OVERRIDDEN)
    for file in Path(qat.tensorrt.__file__).parent.glob("*.py"):
        runtime_config = file.name == "runner.py"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) == "member" and isinstance(node.args[0], ast.Constant):
                member = node.args[1]
                suffix = f".{member.value}" if isinstance(member, ast.Constant) else ""
                found.add(f"{node.args[0].value}{suffix}")
            if not isinstance(node, ast.Attribute):
                continue
            owner = _name(node.value)
            if owner == "trt":
                found.add(node.attr)
            elif isinstance(node.value, ast.Attribute) and _name(node.value.value) == "trt":
                found.add(f"{owner}.{node.attr}")
            elif owner == "config" and runtime_config:
                found.add(f"IRuntimeConfig.{node.attr}")
            elif owner in OBJECTS and (owner, node.attr) not in NOT_TENSORRT:
                found.add(f"{OBJECTS[owner]}.{node.attr}")
    return {name for name in found if "__" not in name and name not in ("trt_logger",)}


def _missing(module: object, names: set[str]) -> list[str]:
    missing = []
    for name in sorted(names):
        owner: object = module
        for part in name.split("."):
            owner = getattr(owner, part, None)
            if owner is None:
                missing.append(name)
                break
    return missing


def test_the_scan_finds_what_is_known_to_be_used() -> None:
    expected = {
        "Builder.build_serialized_network",
        "IBuilderConfig.builder_optimization_level",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "IExecutionContext.execute_async_v3",
        "ParserError.node_operator",
        "ICudaEngine.get_tensor_profile_shape",
        "BuilderFlag.TF32",
        "LayerInformationFormat.JSON",
        "IOutputAllocator",
        "ITimingCache.combine",
        "EngineInspector.get_engine_information",
        "TensorIOMode",
    }
    assert expected <= used_names()


def test_every_name_exists_in_rtx(rtx) -> None:
    assert _missing(rtx.trt, used_names()) == []


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(request, tmp_path_factory):
    """A folder with the bindings of one version, and one with stub libraries."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to compile stub libraries")
    version = request.param
    folder = tmp_path_factory.mktemp(f"tensorrt-{version}")
    wheel = f"tensorrt-cu13-bindings=={version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "--retries",
        "0",
        "--timeout",
        "10",
        "-d",
        str(folder),
        wheel,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        pytest.skip(f"pip cannot download {wheel} here: {(run.stderr.strip().splitlines() or ['no reason'])[-1]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder / "site")
    source = folder / "stub.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS))
    (folder / "lib").mkdir()
    for library in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        target = folder / "lib" / f"lib{library}.so.{version.split('.')[0]}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return version, folder


_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt
missing = []
for name in json.loads(sys.argv[2]):
    owner = trt
    for part in name.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            missing.append(name)
            break
print(json.dumps([trt.__version__, missing]))
"""


def test_every_name_exists_in_tensorrt_10_and_11(bindings) -> None:
    version, folder = bindings
    names = {n for n in used_names() if n not in RTX_ONLY and n.split(".")[0] not in RTX_ONLY}
    command = [sys.executable, "-c", _PROBE, str(folder / "site"), json.dumps(sorted(names))]
    environment = {"LD_LIBRARY_PATH": str(folder / "lib"), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found, missing = json.loads(run.stdout.strip().splitlines()[-1])
    assert found == version and missing == []


def test_nothing_is_used_that_tensorrt_11_dropped() -> None:
    gone = {"BuilderFlag.FP16", "BuilderFlag.INT8", "NetworkDefinitionCreationFlag.EXPLICIT_BATCH"}
    gone |= {"IBuilderConfig.int8_calibrator", "ICudaEngine.device_memory_size", "OnnxParser.supports_model"}
    assert not gone & used_names()


def test_rtx_only_names_are_really_missing_elsewhere(bindings) -> None:
    """A name listed as RTX's own that TensorRT has as well would hide a check."""
    version, folder = bindings
    command = [sys.executable, "-c", _PROBE, str(folder / "site"), json.dumps(sorted(RTX_ONLY))]
    environment = {"LD_LIBRARY_PATH": str(folder / "lib"), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert set(json.loads(run.stdout.strip().splitlines()[-1])[1]) == RTX_ONLY, version


def test_numbers_of_flags_are_never_written() -> None:
    for file in Path(qat.tensorrt.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) in ("set_flag", "clear_flag", "create_network"):
                assert not any(isinstance(child, ast.Constant) and child.value != 1 for child in ast.walk(node.args[0]))


def test_library_or_reason() -> None:
    try:
        assert load_library().version
    except EngineError as error:
        assert "pip install" in str(error)
