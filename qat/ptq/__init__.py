"""Better post-training quantization: what can be done to a model before, or in place of, training it.

equalize                before calibration: channels of like range (cross-layer equalization)
adaround                after it: weights rounded so that each layer's output is right
correct_biases          after it: the mean error of each channel taken out of the bias
reestimate_batch_norm   after it: running statistics of the quantized model
improve                 any of the last three, in that order
"""

from qat.ptq.adaround import AdaRoundReport, adaround
from qat.ptq.batch_norm import reestimate_batch_norm
from qat.ptq.bias_correction import BiasReport, correct_biases
from qat.ptq.equalization import EqualizationReport, equalize
from qat.ptq.improving import STEPS, improve, ordered_steps
from qat.ptq.rounding import Rounding, RoundingConfig

__all__ = [
    "STEPS",
    "AdaRoundReport",
    "BiasReport",
    "EqualizationReport",
    "Rounding",
    "RoundingConfig",
    "adaround",
    "correct_biases",
    "equalize",
    "improve",
    "ordered_steps",
    "reestimate_batch_norm",
]
