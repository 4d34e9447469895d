"""TensorRT: build, reuse, inspect, run and measure engines. The only package that imports TensorRT, and only in use."""

from qat.tensorrt.api import Library, load_library
from qat.tensorrt.benchmark import EngineTiming, measure_engine
from qat.tensorrt.build import BuildResult, build_engine
from qat.tensorrt.concats import Concatenation, concatenations
from qat.tensorrt.engine import LoadedEngine, load_engine
from qat.tensorrt.inspection import Inspection, Operation, inspect_layers
from qat.tensorrt.layers import Layer, layers_from_inspector
from qat.tensorrt.log_listing import layers_from_log
from qat.tensorrt.onnx_graph import OnnxGraph
from qat.tensorrt.options import BuildOptions
from qat.tensorrt.page import write_page
from qat.tensorrt.profiles import Profile, ShapeRange, make_profiles, parse_shapes
from qat.tensorrt.refit import refit_engine
from qat.tensorrt.runner import TensorRTRunner
from qat.tensorrt.store import StoredEngine, build_or_reuse, read_manifest

__all__ = [
    "BuildOptions",
    "BuildResult",
    "Concatenation",
    "EngineTiming",
    "Inspection",
    "Layer",
    "Library",
    "LoadedEngine",
    "OnnxGraph",
    "Operation",
    "Profile",
    "ShapeRange",
    "StoredEngine",
    "TensorRTRunner",
    "build_engine",
    "build_or_reuse",
    "concatenations",
    "inspect_layers",
    "layers_from_inspector",
    "layers_from_log",
    "load_engine",
    "load_library",
    "make_profiles",
    "measure_engine",
    "parse_shapes",
    "read_manifest",
    "refit_engine",
    "write_page",
]
