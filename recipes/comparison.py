"""Measuring FP32, FP16, PTQ and QAT on torch, ONNX Runtime and TensorRT: accuracy, latency, sizes, INT8 coverage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qat.distributed import world_size
from qat.errors import ConfigError, QatError
from qat.files import write_json
from qat.report import environment
from qat.runtime import Arrays, OnnxRuntimeRunner, Runner, TorchRunner
from qat.runtime.data import random_inputs
from qat.runtime.latency import Latency, measure_runner, sweep_batches
from qat.runtime.torch import measure_torch
from qat.tensorrt import Inspection, Library, TensorRTRunner, load_engine, measure_engine
from qat.tensorrt.gpu_state import gpu_state
from qat.tensorrt.store import hash_onnx
from recipes.candidates import Candidate, candidates, folder_of, names
from recipes.cells import BACKENDS, ORT, TENSORRT, TORCH, Cell, Measuring, finite
from recipes.classification import Classification
from recipes.config import to_plain
from recipes.data import image_shape
from recipes.engines import build_for, find_library

LEAST_RUNS = 3


class Comparison:
    """Fills the cells, one model and backend at a time; compare.json is written after each, and reused when resumed."""

    def __init__(self, run: Classification, how: Measuring) -> None:
        if world_size() > 1:
            raise ConfigError(
                "compare.py measures in one process. Train with torchrun and qat_finetune.py, then start compare.py "
                "without torchrun: it takes over the finished stages."
            )
        self.run, self.how = run, how
        # Asked before anything is trained: with tensorrt.build=always a missing library ends the run here.
        self.library: Library | str = find_library(run.config)
        self.path = folder_of(run.config) / "compare.json"
        self.header: dict[str, Any] = {
            "config": to_plain(run.config),
            "device": str(run.device),
            "environment": environment(),
            "torch_threads": torch.get_num_threads(),
            "measuring": to_plain(how),
        }
        self.cells: list[Cell] = []
        self.earlier: dict[tuple[str, str, str], Cell] = {}
        self.inspections: dict[str, Inspection] = {}

    def fill(self) -> None:
        """Measure everything."""
        self.earlier = self._finished_before()
        measures = {TORCH: self._torch, ORT: self._onnxruntime, TENSORRT: self._tensorrt}
        with tqdm(total=len(names(self.run.config)) * len(BACKENDS), desc="compare") as bar:
            for candidate in candidates(self.run):
                sha256 = hash_onnx(candidate.files[ORT]) if ORT in candidate.files else ""
                for backend, measure in measures.items():
                    bar.set_postfix_str(f"{candidate.name} on {backend}")
                    cell = self.earlier.pop((candidate.name, backend, sha256), None)
                    if cell is None:
                        cell = Cell(candidate.name, backend, sha256)
                        measure(candidate, cell)
                    self.cells.append(cell)
                    self.save()
                    bar.update()
        self.earlier.clear()

    def save(self, **more: Any) -> None:
        """Write compare.json: what made the numbers, and the cells so far."""
        cells = [asdict(cell) for cell in (*self.cells, *self.earlier.values())]
        write_json(self.path, {**self.header, "gpu_state": gpu_state(), **more, "cells": cells})

    def _finished_before(self) -> dict[tuple[str, str, str], Cell]:
        """Whole cells of an earlier run that was measured alike; engines have a store of their own."""
        try:
            old = json.loads(self.path.read_text())
            if _without_date(old) != _without_date(json.loads(json.dumps(self.header))):
                return {}
            cells = [Cell(**values) for values in old["cells"]]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {(c.model, c.backend, c.sha256): c for c in cells if c.sha256 and not c.why and c.backend != TENSORRT}

    def _torch(self, candidate: Candidate, cell: Cell) -> None:
        module, run = candidate.module, self.run
        cell.bytes = sum(t.numel() * t.element_size() for t in module.state_dict().values() if isinstance(t, Tensor))
        with cell.part("accuracy"):
            cell.metrics = finite(run.evaluate(module))
        runner = TorchRunner(module, ["input"], ["output"], run.device, self.how.compile_torch)

        def timed(inputs: Arrays) -> Latency:
            execution, with_copies = measure_torch(runner, inputs, *self._runs(runner, inputs))
            if run.device.type == "cuda":
                parts = {"execution": execution.to_dict(), "with_copies": with_copies.to_dict()}
                cell.timings[str(execution.batch)] = parts
            return execution

        self._sweep(cell, "input", timed)

    def _onnxruntime(self, candidate: Candidate, cell: Cell) -> None:
        if (file := self._file(candidate, cell)) is None:
            return
        with cell.part("accuracy"):
            cell.metrics = finite(self.run.evaluate_onnx(file, self.run.config.export.eval_images))
        with cell.part("execution"):
            runner = OnnxRuntimeRunner(file, reference=False)
            self._sweep(
                cell, runner.input_names[0], lambda inputs: measure_runner(runner, inputs, *self._runs(runner, inputs))
            )

    def _tensorrt(self, candidate: Candidate, cell: Cell) -> None:
        if (file := self._file(candidate, cell)) is None:
            return
        with cell.part("engine"):
            if isinstance(self.library, str):
                raise QatError(self.library)
            built = build_for(self.run.config, self.library, file)
            cell.engine = built.to_dict()
            self.inspections[candidate.name] = built.inspection
        if not cell.engine:
            return
        with cell.part("execution"):
            if built.why_not_run:
                raise QatError(built.why_not_run)
            loaded = load_engine(built.stored.path, built.library)
            runner = TensorRTRunner(loaded)
            with cell.part("accuracy"):
                cell.metrics = finite(self.run.evaluate_runner(runner))

            def timed(inputs: Arrays) -> Latency:
                timing = measure_engine(loaded, inputs, iterations=self.how.iterations)
                cell.timings[str(timing.execution.batch)] = timing.to_dict()
                return timing.execution

            self._sweep(cell, runner.input_names[0], timed)

    def _file(self, candidate: Candidate, cell: Cell) -> Path | None:
        file = candidate.files.get(cell.backend)
        if file is None:
            cell.why["file"] = candidate.why_no_file
        else:
            cell.bytes = file.stat().st_size
        return file

    def _runs(self, runner: Runner, inputs: Arrays) -> tuple[int, int]:
        """Runs for warming up, and runs that count: as many as fit into the time given."""
        # The first run may compile and allocate: the second one tells.
        once = measure_runner(runner, inputs, warmup=1, iterations=1)
        fitting = int(1000 * self.how.seconds / max(once.mean_ms, 1e-3))
        runs = min(self.how.iterations, max(LEAST_RUNS, fitting))
        return runs // 10, runs

    def _sweep(self, cell: Cell, name: str, measure: Callable[[Arrays], Latency]) -> None:
        shape = image_shape(self.run.config.data)
        points = sweep_batches(
            lambda size: measure(random_inputs({name: (size, *shape)}, {name: "float32"})), self.how.batches
        )
        for point in points:
            if point.latency is None:
                cell.why[f"batch {point.batch}"] = point.reason
            else:
                cell.latency[str(point.batch)] = point.latency.to_dict()


def _without_date(results: Mapping[str, Any]) -> dict[str, Any]:
    same = {key: results[key] for key in ("config", "device", "torch_threads", "measuring")}
    return {**same, "environment": {k: v for k, v in results["environment"].items() if k != "date"}}
