"""Where the noise enters: layer by layer, the quantized model against the float one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat.calibration import Forward, run_batch, to_device
from qat.errors import ConfigError
from qat.modes import evaluation_mode, passing_through
from qat.quantizer import QuantizerState, TensorQuantizer, named_quantizers
from qat.sqnr import Sqnr


@dataclass(frozen=True)
class LayerSqnr:
    """One layer's output, in dB; larger is better.

    Attributes:
        name: the module that holds the quantizers; "" is the model itself, whose output comes last.
        own_db: with this module's own quantizers alone, on the float model's input; None where it has none.
        total_db: with the whole model quantized, so with the noise of everything before it.
    """

    name: str
    own_db: float | None
    total_db: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.no_grad()
def layer_sqnr(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = 1,
    reference: nn.Module | None = None,
    forward: Forward = run_batch,
    progress: bool = True,
) -> tuple[LayerSqnr, ...]:
    """Signal-to-quantization-noise ratio at the output of each module that holds quantizers, and of the model.

    Args:
        model: calibrated; it runs twice on each batch and is left as it was.
        batches: tensors, (inputs, ...) sequences or keyword mappings. The outputs of all layers for one batch are in
            memory at once, so give small ones.
        num_batches: how many to take, None for all.
        reference: the float model that `total_db` compares with, whose modules have the same names; None takes the
            model itself with every quantizer passing through.
        forward: how one batch is run.
        progress: show a bar.

    Returns:
        One row a module, in module order, the model last.

    Raises:
        ConfigError: there are no batches, or the model has no quantizer that quantizes.
    """
    comparison = _Comparison(model, reference, forward)
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    count = 0
    with evaluation_mode(model), evaluation_mode(reference or model):
        for batch in tqdm(islice(batches, num_batches), "SQNR", total=num_batches, disable=not progress, leave=False):
            comparison.add(to_device(batch, device))
            count += 1
    if not count:
        raise ConfigError("there are no batches to compare. Check the data folder and the number of batches.")
    return comparison.rows()


class _Comparison:
    """The two runs of each batch, and the sums over batches."""

    def __init__(self, model: nn.Module, reference: nn.Module | None, forward: Forward) -> None:
        self.model, self.reference, self.forward = model, reference, forward
        self.active = [q for _, q in named_quantizers(model) if q.state is QuantizerState.QUANTIZING]
        if not self.active:
            raise ConfigError(f"no quantizer of {type(model).__name__} quantizes. Prepare and calibrate it first.")
        self.modules = dict(model.named_modules())
        self.holders = {name: own for name in self.modules if (own := self._own_quantizers(name)) or not name}
        self.own = {name: Sqnr() for name, quantizers in self.holders.items() if quantizers}
        self.total: dict[str, Sqnr] = {}
        self._outputs: dict[str, list[list[Tensor]]] = {}
        self._inputs: list[tuple[Any, Any]] = []
        self._inside = False

    def _own_quantizers(self, name: str) -> list[TensorQuantizer]:
        chosen = {id(quantizer) for quantizer in self.active}
        return [child for child in self.modules[name].children() if id(child) in chosen]

    def add(self, batch: Any) -> None:
        """Run one batch in float, then quantized."""
        self._outputs = {}
        with ExitStack() as stack, passing_through(self.active):
            for name in self.holders:
                module = self.modules[name]
                stack.callback(module.register_forward_pre_hook(self._remember, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._measure_own(name)).remove)
            self.forward(self.model, batch)
        if self.reference is not None:
            self._outputs = {}
            others = dict(self.reference.named_modules())
            self._run({name: others[name] for name in self.holders if name in others}, self._keep, batch)
        self._run({name: self.modules[name] for name in self.holders}, self._compare, batch)

    def _run(self, modules: dict[str, nn.Module], hook: Callable[[str, Any], None], batch: Any) -> None:
        """Run the model or the reference, with the hook on each module's output."""
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_hook(lambda _m, _i, out, n=name: hook(n, out)).remove)
            self.forward(modules.get("", self.model), batch)

    def _remember(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Copy the inputs: a module may change them in place."""
        if not self._inside:
            from qat.onnx.inputs import map_tensors

            self._inputs.append(map_tensors((args, kwargs), Tensor.clone))

    def _measure_own(self, name: str) -> Any:
        """Hook of the float run: keep the output, and run the module again with its own quantizers on."""

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if self._inside:
                return
            self._keep(name, output)
            args, kwargs = self._inputs.pop()
            quantizers = self.holders[name]
            if not quantizers:
                return
            self._inside = True
            try:
                for quantizer in quantizers:
                    quantizer.state = QuantizerState.QUANTIZING
                _add(self.own[name], self._outputs[name][-1], _floats(module.forward(*args, **kwargs)))
            finally:
                self._inside = False
                for quantizer in quantizers:
                    quantizer.state = QuantizerState.PASSTHROUGH

        return hook

    def _keep(self, name: str, output: Any) -> None:
        self._outputs.setdefault(name, []).append([tensor.clone() for tensor in _floats(output)])

    def _compare(self, name: str, output: Any) -> None:
        calls = self._outputs.get(name)
        if calls:
            _add(self.total.setdefault(name, Sqnr()), calls.pop(0), _floats(output))

    def rows(self) -> tuple[LayerSqnr, ...]:
        """The result; modules that were not run are left out."""
        found = []
        for name in (*(name for name in self.holders if name), ""):
            if name in self.total:
                own = self.own.get(name)
                found.append(LayerSqnr(name, None if own is None else own.db, self.total[name].db))
        return tuple(found)


def _floats(value: Any) -> list[Tensor]:
    from qat.onnx.inputs import tensors_in

    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def _add(total: Sqnr, references: list[Tensor], others: list[Tensor]) -> None:
    for a, b in zip(references, others, strict=True):
        total.add(a, b)
