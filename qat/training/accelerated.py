"""The parts of accelerate that the loop uses, and the cleaning up after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qat.distributed import world_size
from qat.errors import ConfigError
from qat.training.compiled import recomputed_masks
from qat.training.loader import process_rank


def make_accelerator(mixed_precision: str) -> Any:
    """An `accelerate.Accelerator` for this process; under torchrun it joins the process group.

    Raises:
        ConfigError: fp16 without a GPU, or accelerate is in use already without the processes of torchrun.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # Without cpu=True accelerate ignores torchrun where there is no GPU, and every process trains alone.
    cpu = not torch.accelerator.is_available()
    if mixed_precision == "fp16" and cpu:
        raise ConfigError("mixed_precision='fp16' needs a GPU, and this process has none. Use 'bf16' or 'no'.")
    # accelerate keeps the first precision for the life of the process; a float run may be followed by another.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    _, world = process_rank()
    if accelerator.num_processes != world:
        raise ConfigError(
            f"accelerate sees {accelerator.num_processes} process(es) and the launcher started {world}. "
            "Do not create an accelerate object before fine_tune, or create it with cpu=True where there is no GPU."
        )
    return accelerator


@contextmanager
def prepared_model(accelerator: Any, model: nn.Module, compile_mode: str = "no") -> Iterator[nn.Module]:
    """Give the model as accelerate trains it, in DDP where there are processes, with autocast in its forward.

    Unless `compile_mode` is "no", calls of the model go through torch.compile, those of the wrapped and its own.

    Afterwards the attributes that accelerate set on the model are gone, so that it pickles, exports and can be
    trained again with another precision.
    """
    added = ("forward", "_original_forward", "_is_accelerate_prepared")
    before = {name: model.__dict__[name] for name in added if name in model.__dict__}
    try:
        prepared = accelerator.prepare_model(model)
        if compile_mode != "no":
            model.compile(mode=compile_mode)
        with recomputed_masks(model):
            yield prepared
    finally:
        model._compiled_call_impl = None
        accelerator.free_memory()
        for name in added:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)


def broadcast_buffers(model: nn.Module) -> None:
    """Give all processes the buffers of the main one, so that they evaluate what it writes to the checkpoint."""
    if world_size() > 1:
        for buffer in model.buffers():
            if buffer.numel():
                torch.distributed.broadcast(buffer, src=0)


def from_main_process(value: Any) -> Any:
    """The main process's value, in every process."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
