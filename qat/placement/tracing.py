"""Recording one run of a model as a Graph.

The model runs as it is, in evaluation mode, on the example inputs: every leaf module's call and every torch function
called from the code of another module becomes a node. Nothing is re-compiled from the trace; it only decides where
quantizers go. So a path taken on other data, a training-only branch and functional dropout stay as they were written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qat.errors import ConfigError
from qat.placement.callsite import find_caller
from qat.placement.graph import Graph, Key, Node, Value
from qat.placement.operators import function_op, module_op
from qat.quantizer import TensorQuantizer

_READS_DATA = ("bool", "item", "int", "float", "index", "tolist", "nonzero", "numpy")
_ASSIGNING = ("add_", "sub_", "mul_", "div_")
_LIKE_ANOTHER = ("to", "type_as", "view_as", "expand_as", "reshape_as")
"""Functions of whose second tensor only type, device or shape count."""
_IN_PLACE_FREE = ("size", "dim", "numel", "stride", "data_ptr", "is_contiguous", "device", "dtype", "shape")


_WHOLE = (TensorQuantizer, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def is_leaf(module: nn.Module) -> bool:
    """A module that is one operation: torch's own without children, attention and recurrent layers, a quantizer."""
    if isinstance(
        module, TensorQuantizer | nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase | torch.jit.ScriptModule
    ):
        return True
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    children = [child for child in module.children() if not isinstance(child, TensorQuantizer)]
    own_forward = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return not children and own_forward.__module__.startswith(("torch.nn.", "qat.nn."))


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = Graph()
        self.names = {module: name for name, module in model.named_modules()}
        self.values: dict[int, Value] = {}
        self.alive: list[Tensor] = []  # an id belongs to one tensor only as long as the tensor lives
        self.overwritten: dict[int, Node] = {}
        self.runs: dict[nn.Module, Counter[object]] = defaultdict(Counter)
        self.inside_leaf = 0
        self.leaf_arguments: list[tuple[Any, Any]] = []
        for kind, tensors in (("parameter", model.named_parameters()), ("constant", model.named_buffers())):
            for name, tensor in tensors:
                self.values[id(tensor)] = Value(tuple(tensor.shape), tensor.is_floating_point(), kind, name)  # type: ignore[arg-type]

    def value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self.values:
            # Made where nothing is seen: TorchScript, a custom autograd function. It may well depend on the input.
            self.new_value(tensor, None, "activation")
        if id(tensor) in self.overwritten:
            self.overwritten[id(tensor)].seen_elsewhere = True
        return self.values[id(tensor)]

    def new_value(self, tensor: Tensor, node: Node | None, kind: Any, name: str = "") -> Value:
        self.alive.append(tensor)
        made = Value(tuple(tensor.shape), tensor.is_floating_point(), kind, name, node)
        if node is not None:
            made.depth = max((v.depth for v in node.inputs), default=0) + node.weighted
        self.values[id(tensor)] = made
        return made

    def record(self, node: Node, args: Any, kwargs: Any, result: Any) -> None:
        for key, argument in (*enumerate(args), *kwargs.items()):
            tensors = list(tensors_in(argument))
            for tensor in tensors:
                node.inputs.append(self.value(tensor))
                node.keys.append(key)
            if not tensors:
                node.arguments[key] = argument
        outputs = list(tensors_in(result))
        if not outputs:
            return
        values = node.inputs[:1] if node.function in _LIKE_ANOTHER else node.inputs
        active = any(v.kind in ("input", "activation") for v in values)
        node.outputs = [self.new_value(t, node, "activation" if active else "constant") for t in outputs]
        for number, value in enumerate(node.inputs):
            value.readers.append((node, number))
        self.graph.nodes.append(node)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.inside_leaf:
            return result
        name = _function_name(func)
        if name in _READS_DATA:
            owner = find_caller(self.names, "").module
            if owner is not None and any(self.value(t).kind == "activation" for t in tensors_in(args)):
                self.graph.branching.setdefault(self.names[owner], name)
        elif any(True for _ in tensors_in(result)) and name not in _IN_PLACE_FREE:
            method = getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func
            if getattr(func, "__name__", "") in _ASSIGNING and result is args[0]:
                return self._record_assignment(name, method, args, kwargs)
            self._record_function(name, method, args, kwargs, result)
        return result

    def _record_assignment(self, name: str, method: bool, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """`x += y`, which calls `add_`, gives x another object: a reader of the old one has it under another name."""
        old: Tensor = args[0]
        result = old.view_as(old)
        node = self._record_function(name, method, args, kwargs, result)
        if node is None:
            return old
        node.assigns = True
        self.values[id(old)] = self.values[id(result)]
        memory = old.untyped_storage().data_ptr()
        same = (t for t in self.alive if t is not result and t.untyped_storage().data_ptr() == memory)
        self.overwritten.update((id(tensor), node) for tensor in same)
        return result

    def _record_function(
        self, name: str, method: bool, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> Node | None:
        caller = find_caller(self.names, name)
        owner = caller.module
        if owner is None:
            return None
        first = next(tensors_in([args, kwargs]), None)
        plain: dict[Key, Any] = dict(enumerate(args))
        plain.update(kwargs)
        op = function_op(name, plain, 0 if first is None else first.dim())
        node = Node(op, self.names[owner], owner, True, name, method, caller.location, caller.obstacle)
        node.run = self.runs[owner][caller.location]
        self.runs[owner][caller.location] += 1
        self.record(node, args, kwargs, result)
        return node

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inside_leaf and is_leaf(module):
            self.leaf_arguments.append((args, kwargs))
        self.runs.pop(module, None)
        self.inside_leaf += is_leaf(module)

    def leave(self, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        self.inside_leaf -= is_leaf(module)
        if not self.inside_leaf and is_leaf(module):
            self.record(Node(module_op(module), self.names[module], module), *self.leaf_arguments.pop(), result)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested sequences, mappings and dataclass-like outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def _function_name(func: Any) -> str:
    """Name of a torch function without underscores at its ends: `Tensor.__iadd__` -> "iadd", `Tensor.mT` -> "mT"."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        name = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name.strip("_")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def call_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a sequence (positional) or a mapping (keywords)."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs), {}) if isinstance(example_inputs, list | tuple) else ((example_inputs,), {})


def run_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model returns in evaluation mode.

    Raises:
        ConfigError: it does not run on these arguments.
    """
    with _evaluating(model), torch.no_grad():
        try:
            return model(*args, **kwargs)
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} does not run on the example inputs: {error}. Give inputs that model(*inputs) "
                "takes: a tensor, a sequence of positional arguments, or a mapping of keyword arguments."
            ) from error


def trace(model: nn.Module, example_inputs: Any) -> Graph:
    """Run the model once and record it; buffers, modes and hooks are as before.

    Args:
        model: float, or already with quantizers.
        example_inputs: a tensor, a sequence of positional arguments, or a mapping of keyword arguments.

    Raises:
        ConfigError: the model does not run on the example inputs.
    """
    args, kwargs = call_arguments(example_inputs)
    recorder = _Recorder(model)
    for key, argument in (*enumerate(args), *kwargs.items()):
        for number, tensor in enumerate(tensors_in(argument)):
            recorder.new_value(tensor, None, "input", f"{key}" if number == 0 else f"{key}[{number}]")
    with ExitStack() as stack:
        for module in recorder.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            stack.callback(module.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(recorder.leave, with_kwargs=True).remove)
        stack.enter_context(recorder)
        result = run_once(model, args, kwargs)
    graph = recorder.graph
    graph.outputs = [recorder.value(tensor) for tensor in tensors_in(result)]
    run = {node.module for node in graph.nodes}
    compiled = [name for module, name in recorder.names.items() if isinstance(module, torch.jit.ScriptModule)]
    graph.opaque = {n: "it is compiled by TorchScript" for n in compiled if n.rpartition(".")[0] not in compiled}
    graph.unreached = [
        name
        for module, name in recorder.names.items()
        if module_op(module) in ("conv", "conv_transpose", "linear", "multihead_attention") and module not in run
    ]
    return graph
