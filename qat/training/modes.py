"""What changes in a model while it trains: how amax moves, and whether BatchNorm does."""

from __future__ import annotations

from torch import nn

from qat.quantizer import AmaxMode, QuantizerState, TensorQuantizer, named_quantizers


def apply_amax_mode(model: nn.Module, mode: AmaxMode | str) -> list[TensorQuantizer]:
    """Set the amax mode of every calibrated quantizer that quantizes; call it before the optimizer is built.

    A quantizer keeps FROZEN where its descriptor fixes amax, and LEARNED where its descriptor asks for it. One that
    passes through or has no amax is left alone: as a parameter it would have no gradient, which DDP refuses.

    Returns:
        The quantizers that follow `mode`.
    """
    wanted = AmaxMode(mode)
    followers = []
    for _, quantizer in named_quantizers(model):
        usable = quantizer.calibrated and not quantizer.fixed and quantizer.state is QuantizerState.QUANTIZING
        chosen = AmaxMode.LEARNED if quantizer.descriptor.learn_amax else wanted
        quantizer.set_amax_mode(chosen if usable else AmaxMode.FROZEN)
        if quantizer.amax_mode is wanted:
            followers.append(quantizer)
    return followers


def freeze_batch_norm(model: nn.Module) -> int:
    """Put every BatchNorm in eval mode: it uses its running statistics and no longer changes them.

    Its weight and bias still train. `model.train()` undoes this, so call it after.

    Returns:
        The number of BatchNorm modules.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            count += 1
    return count
