"""Random small networks as source code, so that placement can read it and a failure can be pasted into a test."""

from __future__ import annotations

import hashlib
import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = (1, 3, 5, 8, 16, 16, 16, 24, 32, 32)
ACTIVATIONS = ("ReLU", "ReLU6", "SiLU", "Hardswish", "GELU", "Sigmoid", "LeakyReLU", "Tanh", "ELU")
FUNCTIONS = ("torch.relu({a})", "F.silu({a})", "F.hardswish({a})", "torch.sigmoid({a})", "{a} * torch.sigmoid({a})")
LARGEST = 6000
"""Elements of a tensor, batch included."""


@dataclass
class Draft:
    """A network that grows: each line is tried and kept where it works, for batches of 2 and of 4."""

    rng: random.Random
    values: dict[str, Tensor] = field(default_factory=dict)
    larger: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    holder: nn.Module = field(default_factory=nn.Module)

    def pick(self) -> str:
        """A value, mostly a recent one."""
        names = list(self.values)
        return names[-1] if self.rng.random() < 0.7 else self.rng.choice(names)

    @torch.no_grad()
    def try_line(self, expression: str, layer: str = "") -> None:
        """Append `v = expression`, in which `self.new` is the new layer, if torch takes it and a batch stays one."""
        name, layer_name = f"v{len(self.lines)}", f"layer{len(self.layers)}"
        expression = expression.replace("self.new", f"self.{layer_name}")
        scope = {"torch": torch, "F": F, "self": self.holder}
        try:
            if layer:
                setattr(self.holder, layer_name, eval(layer, {"nn": nn}))
            y, larger = (eval(expression, {**scope, **values}) for values in (self.values, self.larger))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return
        usable = isinstance(y, Tensor) and y.dim() > 1 and 0 < y.numel() <= LARGEST
        if not usable or y.shape[0] != 2 or larger.shape != (4, *y.shape[1:]):
            return
        self.layers |= {layer_name: layer} if layer else {}
        self.values[name], self.larger[name] = y, larger
        self.lines.append(f"{name} = {expression}")


def _conv(d: Draft) -> tuple[str, str]:
    a, r = d.pick(), d.rng
    x = d.values[a]
    dims, channels = max(1, min(3, x.dim() - 2)), x.shape[1]
    out = r.choice(CHANNELS)
    kernel = r.choice((1, 2, 3, 3, 5))
    groups = r.choice([g for g in range(1, channels + 1) if channels % g == 0 and out % g == 0])
    settings = f"{channels}, {out}, {kernel}, stride={r.choice((1, 1, 2))}, groups={groups}, bias={r.random() < 0.7}"
    if r.random() < 0.15:
        return f"self.new({a})", f"nn.ConvTranspose{dims}d({settings}, padding={r.randint(0, kernel // 2)})"
    mode = r.choice(("zeros",) * 6 + ("reflect", "replicate", "circular"))
    padding = r.choice((0, kernel // 2, kernel // 2, kernel - 1))
    where = f"padding={padding}, dilation={r.choice((1, 1, 1, 2))}, padding_mode='{mode}'"
    return f"self.new({a})", f"nn.Conv{dims}d({settings}, {where})"


def _norm(d: Draft) -> tuple[str, str]:
    a = d.pick()
    x = d.values[a]
    dims = max(1, min(3, x.dim() - 2))
    kinds = [f"nn.BatchNorm{dims}d({x.shape[1]})"] * 4 + [f"nn.GroupNorm(1, {x.shape[1]})"]
    return f"self.new({a})", d.rng.choice(kinds)


def _activation(d: Draft) -> tuple[str, str]:
    a = d.pick()
    if d.rng.random() < 0.5:
        return d.rng.choice(FUNCTIONS).format(a=a), ""
    return f"self.new({a})", f"nn.{d.rng.choice(ACTIVATIONS)}()"


def _join(d: Draft) -> tuple[str, str]:
    a, b = d.pick(), d.rng.choice(list(d.values))
    forms = (
        "{a} + {b}",
        "torch.add({a}, {b})",
        "torch.cat([{a}, {b}], 1)",
        "{a} * {b}",
        "torch.cat(({b}, {a}, {b}), 1)",
    )
    return d.rng.choice(forms).format(a=a, b=b), ""


def _pool(d: Draft) -> tuple[str, str]:
    a, r = d.pick(), d.rng
    dims = max(1, min(3, d.values[a].dim() - 2))
    kernel = r.choice((2, 3))
    if r.random() < 0.3:
        return f"self.new({a})", f"nn.AdaptiveAvgPool{dims}d({r.choice((1, 2))})"
    kind = r.choice(("Max", "Avg"))
    return f"self.new({a})", f"nn.{kind}Pool{dims}d({kernel}, {r.choice((1, 2))}, padding={r.choice((0, 0, 1))})"


def _shape(d: Draft) -> tuple[str, str]:
    a = d.pick()
    shuffles = ("F.interpolate({a}, scale_factor=2.0)", "F.pixel_shuffle({a}, 2)", "F.pad({a}, (1, 0, 0, 1))")
    views = ("{a}.flatten(2).transpose(1, 2)", "{a}[:, ::2]", "{a}.chunk(2, 1)[1]", "{a}.mean((2, 3), keepdim=True)")
    return d.rng.choice(
        (*shuffles, *views, "{a}.flatten(1)", "{a}.permute(0, 2, 3, 1)", "F.dropout({a}, 0.5, self.training)")
    ).format(a=a), ""


def _linear(d: Draft) -> tuple[str, str]:
    a = d.pick()
    return (
        f"self.new({a})",
        f"nn.Linear({d.values[a].shape[-1]}, {d.rng.choice((1, 5, 16, 32))}, bias={d.rng.random() < 0.7})",
    )


def _shared(d: Draft) -> tuple[str, str]:
    if not d.layers:
        return _conv(d)
    return f"self.{d.rng.choice(list(d.layers))}({d.pick()})", ""


def _squeeze(d: Draft) -> tuple[str, str]:
    a = d.pick()
    channels = d.values[a].shape[1]
    return f"{a} * torch.sigmoid(self.new({a}.mean((2, 3), keepdim=True)))", f"nn.Conv2d({channels}, {channels}, 1)"


def _attention(d: Draft) -> tuple[str, str]:
    a = d.pick()
    return f"torch.softmax({a} @ {a}.transpose(-1, -2) * 0.25, -1) @ {a}", ""


MOVES: dict[Callable[[Draft], tuple[str, str]], int] = {
    _conv: 10, _norm: 3, _activation: 5, _join: 5, _pool: 2,
    _shape: 3, _linear: 2, _shared: 2, _squeeze: 1, _attention: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Source of a class `Network`, and the shape of one sample of its input."""

    source: str
    sample: tuple[int, ...]

    def build(self) -> nn.Module:
        """The module, in evaluation mode, its source known to `inspect` and tracebacks."""
        name = f"<fuzz {hashlib.sha256(self.source.encode()).hexdigest()[:12]}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        scope = {"__name__": "fuzz_network", "torch": torch, "nn": nn, "F": F}
        exec(compile(self.source, name, "exec"), scope)
        model = scope["Network"]()
        assert isinstance(model, nn.Module)
        return model.eval()


def draw_network(rng: random.Random, moves: int = 10) -> Network:
    """A network of up to `moves` operations."""
    dims = rng.choice((2, 2, 2, 2, 1, 3))
    sides = [rng.randint(5, 9) if dims < 3 else rng.randint(3, 5) for _ in range(dims)]
    sample = (rng.choice(CHANNELS), *sides)
    draft = Draft(rng, {"x": torch.zeros(2, *sample)}, {"x": torch.zeros(4, *sample)})
    draft.try_line(*_conv(draft))
    for _ in range(rng.randint(1, moves)):
        draft.try_line(*rng.choices(list(MOVES), list(MOVES.values()))[0](draft))
    unread = [name for name in draft.values if not any(name in line.partition("=")[2] for line in draft.lines)]
    outputs = unread[-2:] if len(unread) > 1 and rng.random() < 0.2 else list(draft.values)[-1:]
    init = [f"        self.{name} = {text}" for name, text in draft.layers.items()]
    body = [f"        {line}" for line in draft.lines]
    parts = ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()", *init]
    return Network(
        "\n".join([*parts, "    def forward(self, x):", *body, f"        return {', '.join(outputs)}", ""]), sample
    )
