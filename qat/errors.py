"""The errors this library raises. Each message says which field, file or layer, which value, why, and what to do."""

__all__ = [
    "CalibrationError",
    "ConfigError",
    "DescriptorError",
    "EngineError",
    "ExportError",
    "NotCalibratedError",
    "QatError",
    "RunnerError",
    "TrainingError",
    "WriteError",
]


class QatError(Exception):
    """Base of every error raised on purpose by this library."""


class DescriptorError(QatError, ValueError):
    """A QuantDescriptor field has a value, or a combination of values, that cannot be used."""


class CalibrationError(QatError, RuntimeError):
    """Calibration data or calibration state cannot give a usable amax."""


class NotCalibratedError(QatError, RuntimeError):
    """A quantizer without amax was asked to quantize."""


class TrainingError(QatError, RuntimeError):
    """Training cannot go on: it diverged (NaN or infinite), memory ran out, or a process that loads data died."""


class ExportError(QatError, RuntimeError):
    """A model cannot be written as a Q/DQ file, or the file disagrees with the model."""


class ConfigError(QatError, ValueError):
    """A configuration value, file or folder cannot be used."""


class WriteError(QatError, OSError):
    """A file or folder cannot be written: no space, no permission, a read-only or a failing disk."""


class RunnerError(QatError, RuntimeError):
    """A runner cannot load its model or execute it with the inputs given."""


class EngineError(QatError, RuntimeError):
    """TensorRT cannot be used, or cannot parse, build, load or execute what it was given."""


def refuse_below_one(settings: object, *names: str, group: str = "") -> None:
    """Check that fields of a configuration are at least 1.

    Args:
        settings: the dataclass.
        names: its fields, numbers.
        group: what stands before their names in the file, such as "data.".

    Raises:
        ConfigError: one is smaller; the message names it.
    """
    for name in names:
        value = getattr(settings, name)
        if value < 1:
            raise ConfigError(f"{group}{name}={value} is below 1. Use 1 or more.")
