"""Calibrators: they collect statistics of a tensor and compute its amax."""

from qat.calib.base import Calibrator, make_calibrator, register_calibrator
from qat.calib.histogram import HistogramCalibrator
from qat.calib.max import MaxCalibrator

__all__ = ["Calibrator", "HistogramCalibrator", "MaxCalibrator", "make_calibrator", "register_calibrator"]
