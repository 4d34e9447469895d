"""Oscillating weights and clipped shares."""

import torch
from torch import nn

import qat
from qat.debug import Monitor, Oscillation


def test_only_codes_that_turn_back_oscillate() -> None:
    # Columns: steady, rising, oscillating every step, there and back once.
    steps = [[0, 1, 0, 5], [0, 2, 1, 6], [0, 3, 0, 6], [0, 4, 1, 5], [0, 5, 0, 5]]
    tracked = Oscillation(torch.tensor(steps[0]), momentum=0.5)
    for codes in steps[1:]:
        tracked.update(torch.tensor(codes))
    # The third turns in steps 2, 3 and 4: ((0.5) * 0.5 + 0.5) * 0.5 + 0.5; the fourth in step 3 only: 0.5 * 0.5.
    assert tracked.frequency.tolist() == [0.0, 0.0, 0.875, 0.25]
    assert tracked.share(0.3).item() == 0.25
    extremes = Oscillation(torch.tensor([-127, 127]), momentum=1.0)
    extremes.update(torch.tensor([127, -128]))
    extremes.update(torch.tensor([-127, 127]))
    assert extremes.frequency.tolist() == [1.0, 1.0], "differences beyond 8 bits"


def test_weights_are_followed_through_optimizer_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    qat.quantize_(model)
    qat.calibrate(model, [torch.ones(1, 4)], progress=False)
    model.train()
    layer = model[0]
    layer._input_quantizer.amax = 0.5
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.5, 0.25, 3.0]]))
    layer._weight_quantizer.amax = torch.tensor([1.0])
    monitor = Monitor(model)
    for step in range(40):
        monitor.watch(step == 0)
        model(torch.tensor([[0.1, 0.2, 0.9, -0.9]]))
        with torch.no_grad():
            layer.weight[0, 1] += 0.02 if step % 2 else -0.02
            layer.weight[0, 2] += 0.01
        monitor.step()
    scalars = monitor.scalars()
    assert scalars["oscillating/0._weight_quantizer"] == scalars["oscillating_weights"] == 25.0
    assert scalars["clipped/0._weight_quantizer"] == 25.0
    assert scalars["clipped/0._input_quantizer"] == 50.0, "0.9 and -0.9 are outside 0.5"
    model(torch.ones(1, 4))
    assert "clipped/0._input_quantizer" not in monitor.scalars(), "not watched, and the counts start anew"
    monitor.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
