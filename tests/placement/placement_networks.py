"""Small networks with every pattern that placement has a rule for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C = 16


def conv(inputs: int, outputs: int, kernel: int = 3, **options: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(C, C), conv(C, C)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.relu(self.conv1(x)))
        out += x
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.conv, self.expand = conv(64, C, 1), conv(C, C), conv(C, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.expand(F.relu(self.conv(F.relu(self.reduce(x))))) + x)


class Downsample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(C, 32, stride=2), conv(32, 32)
        self.shortcut = conv(C, 32, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.conv1(x)))
        return F.relu(torch.add(out, self.shortcut(x)))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.conv1, self.conv2 = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + x


class Inverted(nn.Module):
    """Two MobileNetV2 blocks: the first's output is the second's identity and the input of its first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(C, 64, 1), nn.ReLU6(), conv(64, 64, groups=64), nn.ReLU6(), conv(64, C, 1)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = x + first(x)
        return x + second(x)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(C, 32)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(32, C, 1), nn.Conv2d(C, 32, 1)
        self.project = conv(32, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.conv(x))
        y = y * torch.sigmoid(self.fc2(F.silu(self.fc1(self.pool(y)))))
        return self.project(y) + x


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, C, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class Dense(nn.ModuleDict):
    """A ModuleDict that runs every child it has, as torchvision's _DenseBlock does."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a", DenseLayer(C))
        self.add_module("b", DenseLayer(2 * C))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(C, C, 3, padding=1), Dense()
        self.norm, self.transition, self.pool = nn.BatchNorm2d(3 * C), nn.Conv2d(3 * C, C, 1), nn.AvgPool2d(2)
        self.last = nn.Conv2d(C, C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.block(self.stem(x))))
        return self.last(self.pool(self.transition(x)))


class PooledForTwo(nn.Module):
    """An average pooling that a convolution reads in INT8 and a BatchNorm in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.norm = nn.Conv2d(C, C, 3, padding=1), nn.AvgPool2d(2), nn.BatchNorm2d(C)
        self.a, self.b = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        return self.b(F.relu(self.norm(x))) - self.a(x)


class SumInPlace(nn.Module):
    """`x += y` where x has been read by a convolution already."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(C, C, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        x += y
        return self.c(x)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b1, self.b2, self.c = conv(C, C, 1), conv(C, C, 1), conv(C, C), conv(C, C, 1)
        self.after = conv(3 * C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.c(F.avg_pool2d(x, 3, 1, 1))
        joined = torch.cat([F.relu(self.a(x)), F.relu(self.b2(F.relu(self.b1(x)))), F.relu(pooled)], 1)
        return self.after(F.max_pool2d(joined, 2))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv(C, C), conv(C, 32)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(32, C, 2, 2)
        self.out, self.head = conv(2 * C, C), nn.Conv2d(C, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down1(x))
        low = F.relu(self.down2(self.pool(skip)))
        return self.head(F.relu(self.out(torch.cat([skip, self.up(low)], dim=1))))


class ViTBlock(nn.Module):
    """`fused` uses F.scaled_dot_product_attention, else the products are written out."""

    def __init__(self, fused: bool, heads: int = 2) -> None:
        super().__init__()
        self.fused, self.heads, self.scale = fused, heads, 0.25
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)

    def attend(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        else:
            weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
            x = self.drop(weights) @ v
        return self.proj(x.transpose(1, 2).reshape(n, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = conv(C, C, groups=C), conv(C, 32, 1)
        self.grouped, self.small = nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.pointwise(F.hardswish(self.depthwise(x))))
        return self.small(F.relu(self.grouped(x)))


class Shared(nn.Module):
    """One layer on three tensors: one quantizer, so one scale for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.other = nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return self.conv(F.relu(self.conv(y))) + self.other(y)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.both(self.left(a) * torch.sigmoid(self.right(b)))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.box, self.classes = conv(C, 32), nn.Conv2d(32, C, 3), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.body(x))
        return {"box": self.box(x), "classes": self.classes(x.mean((2, 3)))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(C, 32), nn.LSTM(32, 32, batch_first=True)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(x))
        return self.head(F.relu(self.mix(y[:, -1])))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pad, self.second = nn.Conv2d(C, C, 3), nn.ZeroPad2d(1), nn.Conv2d(C, C, 3)
        self.reflect, self.third = nn.ReflectionPad2d(1), nn.Conv2d(C, C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(F.pad(x, (0, 1, 0, 1)))
        return self.third(self.reflect(self.second(self.pad(F.relu(x)))))


def same_padded_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


class Functional(nn.Module):
    """Weights used through functions, one of them outside of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.matrix = nn.Parameter(torch.randn(C, C, 3, 3) / 12), nn.Parameter(torch.randn(C, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = same_padded_conv(x, self.weight)
        return F.relu(x).flatten(2).transpose(1, 2) @ self.matrix


def image(channels: int = C, size: int = 12) -> Tensor:
    return torch.randn(2, channels, size, size)


class LocalAttention(nn.Module):
    """EfficientFormer's: the context is added to a convolution of the values, which is the branch to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.local = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        context = F.scaled_dot_product_attention(q, k, v)
        return F.gelu(context + self.local(v))
