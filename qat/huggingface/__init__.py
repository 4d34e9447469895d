"""Encoders of Hugging Face transformers: their attention in reach of quantizers, and calibration without padding."""

from qat.huggingface.attention import ATTENTION, expose_attention_, prepare
from qat.huggingface.calibration import run_unpadded
from qat.huggingface.package import load_transformers
from qat.placement.attention import MASKED

__all__ = ["ATTENTION", "MASKED", "expose_attention_", "load_transformers", "prepare", "run_unpadded"]
