"""Questions to TensorRT's bindings; imported by a test, and run in a process of its own for bindings with stubs."""

import json
import re
import sys
from types import ModuleType


def find(module: ModuleType, name: str) -> object:
    """What a dotted name stands for, or None."""
    owner: object = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def missing_names(module: ModuleType, names: list[str]) -> list[str]:
    return [name for name in sorted(names) if find(module, name) is None]


def argument_counts(function: object) -> set[int]:
    """How many arguments a method takes, self left out: pybind11 writes each overload into the docstring as
    `name(self: T, a: X, b: Y = default) -> Z`.
    """
    counts = set()
    for text in re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) -> ", function.__doc__ or "", re.MULTILINE):
        depth = commas = optional = 0
        for index, letter in enumerate(text):
            depth += (letter in "([{<") - (letter in ")]}" or (letter == ">" and text[index - 1] != "-"))
            commas += letter == "," and not depth
            optional += letter == "=" and not depth
        counts |= set(range(commas - optional, commas + 1))
    return counts


def wrong_calls(module: ModuleType, calls: list[list]) -> list[str]:
    """Calls with a number of arguments that no overload takes."""
    found = [(name, count, argument_counts(find(module, name))) for name, count in calls]
    return [f"{name} takes {sorted(fits)} arguments, not {count}" for name, count, fits in found if count not in fits]


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import tensorrt_bindings

    asked = json.loads(sys.argv[2])
    answer = [missing_names(tensorrt_bindings, asked["names"]), wrong_calls(tensorrt_bindings, asked["calls"])]
    print(json.dumps([tensorrt_bindings.__version__, *answer]))
