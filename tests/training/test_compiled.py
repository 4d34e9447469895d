"""Compiled models with quantizers keep no masks between forward and backward."""

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

import qat
from qat.training import recomputed_masks


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


def quantized(blocks: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *(Residual() for _ in range(blocks)))
    x = torch.randn(2, 3, 18, 18)
    qat.prepare(model.eval(), x, keep_float_logits=False)
    qat.calibrate(model, [x * 0.7], progress=False)
    return model.train(), x


def kept_masks(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor | None]]:
    """Bytes of the boolean tensors saved for the backward pass, and the gradients."""
    masks: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bool:
            masks[tensor.data_ptr()] = tensor.numel()
        return tensor

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        loss = compiled(x).square().sum()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return sum(masks.values()), grads


def test_masks_are_computed_again_and_gradients_are_the_same() -> None:
    model, x = quantized(4)
    saved, want = kept_masks(model, x)
    with recomputed_masks(model):
        recomputed, grads = kept_masks(model, x)
    activation = 2 * 16 * 16 * 16
    assert saved >= 8 * activation, "torch.compile does without by itself: recomputed_masks can go"
    assert recomputed <= 3 * activation, "those of the first and the last ReLU"
    torch.testing.assert_close(grads, want)


@pytest.mark.parametrize(("model", "banned"), [(qat.TensorQuantizer(), False), (nn.Linear(2, 2), True)])
def test_only_models_with_quantizers_are_compiled_differently(model: nn.Module, banned: bool) -> None:
    before = functorch.ban_recompute_used_far_apart
    with recomputed_masks(model):
        assert functorch.ban_recompute_used_far_apart is banned
        assert functorch.ban_recompute_long_fusible_chains is banned
    assert functorch.ban_recompute_used_far_apart is before
