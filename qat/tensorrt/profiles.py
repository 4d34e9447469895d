"""Optimization profiles: the shapes an engine accepts, and the one each profile is tuned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qat.errors import EngineError, RunnerError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """Smallest, tuned and largest shape of one input in one profile."""

    min: Shape
    opt: Shape
    max: Shape

    def __post_init__(self) -> None:
        same_rank = len(self.min) == len(self.opt) == len(self.max)
        if not same_rank or any(
            not lo <= best <= hi for lo, best, hi in zip(self.min, self.opt, self.max, strict=True)
        ):
            raise EngineError(
                f"A profile needs min <= opt <= max in every dimension; got min {show(self.min)}, "
                f"opt {show(self.opt)}, max {show(self.max)}."
            )

    def contains(self, shape: Sequence[int]) -> bool:
        """True if an input of this shape can run in the profile."""
        return len(shape) == len(self.min) and all(
            lo <= size <= hi for lo, size, hi in zip(self.min, shape, self.max, strict=True)
        )


Profile = Mapping[str, ShapeRange]
"""One optimization profile: the shapes of each input, by its name."""


@dataclass(frozen=True)
class NetworkInput:
    """An input as the parsed network declares it; -1 marks a dynamic dimension."""

    name: str
    shape: Shape
    is_shape_tensor: bool = False

    @property
    def is_dynamic(self) -> bool:
        """True if a profile must give its shape (or, for a shape tensor, its values)."""
        return self.is_shape_tensor or -1 in self.shape


def show(shape: Sequence[int]) -> str:
    """A shape in trtexec's spelling, such as 1x3x224x224."""
    return "x".join(map(str, shape)) if shape else "scalar"


def parse_shapes(spec: str) -> dict[str, Shape]:
    """Shapes from trtexec's spelling: `input:1x3x224x224,mask:1x128`; a 0-d tensor is `name:scalar`.

    Raises:
        EngineError: not in that form.
    """
    shapes: dict[str, Shape] = {}
    for part in filter(None, spec.split(",")):
        name, _, text = part.strip().rpartition(":")
        try:
            shape = () if text in ("", "scalar") else tuple(int(size) for size in text.split("x"))
        except ValueError:
            name = ""
        if not name or name in shapes:
            raise EngineError(
                f"Cannot read the shape '{part}' in '{spec}'. Write name:1x3x224x224, several separated by commas, "
                "each name once."
            )
        shapes[name] = shape
    return shapes


def make_profiles(minimum: Sequence[str], optimum: Sequence[str], maximum: Sequence[str]) -> list[Profile]:
    """One profile for each i-th triple of specs; a missing min or max list means the opt shapes.

    Raises:
        EngineError: the lists have different lengths, or name different inputs.
    """
    lengths = {len(specs) for specs in (minimum, optimum, maximum) if specs}
    if len(lengths) > 1 or (lengths and not optimum):
        raise EngineError(
            f"Got {len(minimum)} minShapes, {len(optimum)} optShapes and {len(maximum)} maxShapes. Each profile "
            "takes one of each; minShapes or maxShapes may be left out altogether."
        )
    profiles: list[Profile] = []
    for index, opt_spec in enumerate(optimum):
        opt = parse_shapes(opt_spec)
        low = parse_shapes(minimum[index]) if minimum else opt
        high = parse_shapes(maximum[index]) if maximum else opt
        if not opt.keys() == low.keys() == high.keys():
            raise EngineError(
                f"Profile {index} names the inputs {list(low)} in minShapes, {list(opt)} in optShapes and "
                f"{list(high)} in maxShapes; they must be the same."
            )
        profiles.append({name: ShapeRange(low[name], opt[name], high[name]) for name in opt})
    return profiles


def check_profiles(inputs: Sequence[NetworkInput], profiles: Sequence[Profile]) -> None:
    """Compare profiles with the network's inputs.

    Raises:
        EngineError: a dynamic input without shapes, an unknown name, a wrong rank or a changed fixed dimension.
    """
    dynamic = [item for item in inputs if item.is_dynamic]
    if dynamic and not profiles:
        wanted = ",".join(f"{i.name}:{show([1 if s == -1 else s for s in i.shape])}" for i in dynamic)
        raise EngineError(
            f"The inputs {[i.name for i in dynamic]} are dynamic, so the engine needs an optimization profile: "
            f"give --minShapes, --optShapes and --maxShapes, such as {wanted}."
        )
    known = {item.name: item for item in inputs}
    for index, profile in enumerate(profiles):
        unknown = [name for name in profile if name not in known]
        missing = [item.name for item in dynamic if item.name not in profile]
        if unknown or missing:
            raise EngineError(
                f"Profile {index} does not fit the inputs {list(known)}: unknown {unknown}, missing {missing}."
            )
        for name, shapes in profile.items():
            _check_range(index, known[name], shapes)


def _check_range(index: int, item: NetworkInput, shapes: ShapeRange) -> None:
    if item.is_shape_tensor:
        return
    fixed = [want == -1 or want == lo == hi for want, lo, hi in zip(item.shape, shapes.min, shapes.max, strict=False)]
    if len(shapes.opt) != len(item.shape) or not all(fixed):
        raise EngineError(
            f"Profile {index} gives input '{item.name}' the shapes {show(shapes.min)} to {show(shapes.max)}, but the "
            f"ONNX file declares {show(item.shape)} (-1 is dynamic). Fixed dimensions cannot change."
        )


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Index of the profile that accepts `shapes` and is tuned closest to them.

    Raises:
        RunnerError: no profile accepts them; the message lists what each does.
    """
    best, best_distance = -1, 0
    for index, profile in enumerate(profiles):
        if all(profile[name].contains(shape) for name, shape in shapes.items() if name in profile):
            distance = sum(
                abs(size - tuned)
                for name, shape in shapes.items()
                if name in profile
                for size, tuned in zip(shape, profile[name].opt, strict=True)
            )
            if best < 0 or distance < best_distance:
                best, best_distance = index, distance
    if best < 0:
        accepted = "; ".join(
            f"profile {index}: " + ", ".join(f"{n} {show(s.min)} to {show(s.max)}" for n, s in profile.items())
            for index, profile in enumerate(profiles)
        )
        asked = ", ".join(f"{name} {show(shape)}" for name, shape in shapes.items())
        raise RunnerError(f"No profile of the engine accepts {asked}. It has {accepted}. Build one for these shapes.")
    return best
