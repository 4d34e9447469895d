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

import binding_checks
import pytest
from binding_checks import argument_counts, find, missing_names, wrong_calls

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
    "refitter": "Refitter",
    "parser_refitter": "OnnxParserRefitter",
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
        runtime_config = file.name == "context.py"
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


def used_calls() -> set[tuple[str, int]]:
    """Methods of TensorRT objects that are called, each with its number of arguments; all are positional."""
    found = set()
    for file in Path(qat.tensorrt.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, method = _name(node.func.value), node.func.attr
            if owner in OBJECTS and (owner, method) not in NOT_TENSORRT:
                assert not node.keywords and not any(isinstance(arg, ast.Starred) for arg in node.args)
                found.add((f"{OBJECTS[owner]}.{method}", len(node.args)))
    return found


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


def test_the_scan_finds_calls_with_their_arguments() -> None:
    expected = {
        ("IExecutionContext.execute_async_v3", 1),
        ("IBuilderConfig.set_memory_pool_limit", 2),
        ("Builder.build_serialized_network", 2),
        ("ICudaEngine.create_execution_context", 0),
        ("ICudaEngine.create_execution_context", 1),
        ("OnnxParserRefitter.refit_from_file", 1),
        ("IBuilderConfig.set_timing_cache", 2),
    }
    assert expected <= used_calls()


def test_rtx_has_every_name_and_takes_every_call(rtx) -> None:
    assert missing_names(rtx.trt, used_names()) == []
    assert wrong_calls(rtx.trt, sorted(used_calls())) == []


def test_the_count_of_arguments_knows_overloads_and_defaults(rtx) -> None:
    counts = {
        "ICudaEngine.create_execution_context": {0, 1},
        "IExecutionContext.set_input_shape": {2},
        "ICudaEngine.get_tensor_format": {1, 2},
        "IExecutionContext.infer_shapes": {0},
    }
    assert {name: argument_counts(find(rtx.trt, name)) for name in counts} == counts
    assert wrong_calls(rtx.trt, [("IExecutionContext.infer_shapes", 1)]) == [
        "IExecutionContext.infer_shapes takes [0] arguments, not 1"
    ]


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


def _ask(folder: Path, names: set[str], calls: set[tuple[str, int]]) -> list:
    """Version, missing names, wrong calls."""
    question = json.dumps({"names": sorted(names), "calls": sorted(calls)})
    command = [sys.executable, binding_checks.__file__, str(folder / "site"), question]
    environment = {"LD_LIBRARY_PATH": str(folder / "lib"), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def _is_rtx(name: str) -> bool:
    return name in RTX_ONLY or name.split(".", maxsplit=1)[0] in RTX_ONLY


def test_tensorrt_10_and_11_have_every_name_and_take_every_call(bindings) -> None:
    version, folder = bindings
    names = {name for name in used_names() if not _is_rtx(name)}
    calls = {call for call in used_calls() if not _is_rtx(call[0])}
    assert len(calls) > 40
    assert _ask(folder, names, calls) == [version, [], []]


def test_nothing_is_used_that_tensorrt_11_dropped() -> None:
    gone = {"BuilderFlag.FP16", "BuilderFlag.INT8", "NetworkDefinitionCreationFlag.EXPLICIT_BATCH"}
    gone |= {"IBuilderConfig.int8_calibrator", "ICudaEngine.device_memory_size", "OnnxParser.supports_model"}
    assert not gone & used_names()


def test_rtx_only_names_are_really_missing_elsewhere(bindings) -> None:
    """A name listed as RTX's own that TensorRT has as well would hide a check."""
    version, folder = bindings
    assert set(_ask(folder, RTX_ONLY, set())[1]) == RTX_ONLY, version


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
