"""torch (eager or compiled) behind the Runner interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import RunnerError
from qat.runtime.cuda_timing import time_on_stream
from qat.runtime.latency import Latency, batch_of, measure_runner, summarize
from qat.runtime.runner import Array, Arrays


class TorchRunner:
    """Runs a module in evaluation mode without gradients.

    Args:
        model: takes its inputs by position, in the order of `input_names`; returns a tensor, a sequence or a
            dict of tensors. It is put in evaluation mode and moved to `device`.
        input_names: one name a positional argument.
        output_names: one name a returned tensor; a dict's values are taken in its own order.
        device: where the model runs; results come back as NumPy arrays.
        compile_model: run through `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        input_names: Sequence[str] = ("input",),
        output_names: Sequence[str] = ("output",),
        device: str | torch.device = "cpu",
        compile_model: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.eval().to(self.device)
        self._call: Any = torch.compile(self.model) if compile_model else self.model
        self._input_names = list(input_names)
        self._output_names = list(output_names)

    @property
    def input_names(self) -> list[str]:
        """Names of the positional arguments."""
        return list(self._input_names)

    @property
    def output_names(self) -> list[str]:
        """Names of the returned tensors."""
        return list(self._output_names)

    def tensors(self, inputs: Mapping[str, Array]) -> list[Tensor]:
        """The model's positional arguments on its device.

        Raises:
            RunnerError: input names do not match.
        """
        if set(inputs) != set(self._input_names):
            raise RunnerError(f"The model takes the inputs {self._input_names}; it was given {list(inputs)}.")
        return [torch.as_tensor(inputs[name]).to(self.device) for name in self._input_names]

    @torch.inference_mode()
    def forward(self, tensors: Sequence[Tensor]) -> Any:
        """The model's results for arguments on its device; on a GPU this returns before the work is done."""
        return self._call(*tensors)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Execute once.

        Raises:
            RunnerError: input names do not match, or the model returns another number of tensors than named.
        """
        results = _as_list(self.forward(self.tensors(inputs)))
        if len(results) != len(self._output_names):
            raise RunnerError(
                f"The model returned {len(results)} tensors but the runner has the output names "
                f"{self._output_names}. Give one name a tensor."
            )
        return {name: t.cpu().numpy() for name, t in zip(self._output_names, results, strict=True)}


def measure_torch(
    runner: TorchRunner, inputs: Mapping[str, Array], warmup: int = 10, iterations: int = 100
) -> tuple[Latency, Latency]:
    """Time of one batch: of execution alone, and with the copies from and to NumPy arrays.

    On a GPU execution is timed with CUDA events, as engines are; on a CPU, where there is nothing to copy, both are
    the same measurement.

    Raises:
        RunnerError: input names do not match, or iterations is 0.
    """
    with_copies = measure_runner(runner, inputs, warmup, iterations)
    if runner.device.type != "cuda":
        return with_copies, with_copies
    tensors = runner.tensors(inputs)
    torch.cuda.synchronize(runner.device)
    stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
    times = time_on_stream(lambda: runner.forward(tensors), stream, warmup, iterations)
    return summarize(times, batch_of(inputs)), with_copies


def _as_list(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return list(result.values() if isinstance(result, Mapping) else result)
