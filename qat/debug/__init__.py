"""Finding out what quantization does to a model: noise by layer, histograms by tensor, what happens in training."""

from qat.debug.layers import LayerSqnr, layer_sqnr
from qat.debug.monitor import Monitor, Oscillation
from qat.debug.tensors import TensorStatistics, tensor_statistics

__all__ = ["LayerSqnr", "Monitor", "Oscillation", "TensorStatistics", "layer_sqnr", "tensor_statistics"]
