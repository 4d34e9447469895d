"""Distillation: the loss is the formula, whatever wraps the student, and it teaches what the labels do not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qat.errors import ConfigError
from qat.training import DistillConfig, distilled_loss, fine_tune, make_loader, supervised_loss
from tiny_training import NoisyData, TinyNet, evaluate, quiet, train

TASK = supervised_loss(nn.CrossEntropyLoss())
DATA = NoisyData(16)
BATCH = (DATA.inputs, DATA.labels)


def test_loss_is_the_formula() -> None:
    teacher, student = TinyNet(quantize=False), TinyNet()
    config = DistillConfig(weight=0.7, temperature=3.0, features=("first", "nor*"), feature_weight=0.5)
    loss = distilled_loss(TASK, teacher, config)(student, BATCH)
    p, q = ((model(DATA.inputs) / 3.0).softmax(1) for model in (teacher, student))
    divergence = (p * (p.log() - q.log())).sum(1).mean() * 9.0
    near, far = student.first(DATA.inputs), teacher.first(DATA.inputs)
    distance = (near - far).square().mean() / far.square().mean()  # 'norm' is an identity here: the same again
    torch.testing.assert_close(loss, 0.3 * TASK(student, BATCH) + 0.7 * divergence + 0.5 * distance)
    loss.backward()
    assert student.first.weight.grad is not None
    assert all(p.grad is None for p in teacher.parameters())
    assert not any(module._forward_hooks for module in [*teacher.modules(), *student.modules()])


def test_a_student_equal_to_its_teacher_has_the_task_left() -> None:
    teacher = TinyNet(quantize=False, dropout=0.5)  # the teacher runs in eval mode
    student = copy.deepcopy(teacher).eval()
    loss = distilled_loss(TASK, teacher.train(), DistillConfig(weight=0.25, features=("*",)))(student, BATCH)
    torch.testing.assert_close(loss, 0.75 * TASK(student, BATCH))


def test_gradient_of_the_logits_does_not_vanish_with_the_temperature() -> None:
    """T^2 keeps it of the size it has at T = 1 (Hinton et al. 2015, section 2)."""
    teacher, student, sizes = TinyNet(quantize=False), TinyNet(), []
    for temperature in (2.0, 20.0):
        student.zero_grad()
        distilled_loss(TASK, teacher, DistillConfig(1.0, temperature))(student, BATCH).backward()
        sizes.append(student.head.bias.grad.norm())
    assert 0.3 < sizes[1] / sizes[0] < 3


class TwoHeads(nn.Module):
    """Like GoogLeNet: in training the logits come with auxiliary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.aux = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.head(x), "aux": self.aux(x)} if self.training else self.head(x)


def test_auxiliary_heads_are_not_distilled_and_several_outputs_can_be() -> None:
    teacher, student = TwoHeads(), TwoHeads()
    task = supervised_loss(lambda output, labels: output["aux"].sum() * 0 if isinstance(output, dict) else output.sum())
    distilled_loss(task, teacher, DistillConfig(1.0))(student, BATCH).backward()
    assert student.head.weight.grad.abs().sum() > 0
    assert student.aux.weight.grad.abs().sum() == 0
    both = distilled_loss(TASK, teacher, DistillConfig(1.0), logits=lambda output: [output, output.flip(1)])
    one = distilled_loss(TASK, teacher, DistillConfig(1.0))
    torch.testing.assert_close(both(student.eval(), BATCH), one(student, BATCH))


def test_it_teaches_what_random_labels_cannot(tmp_path: Path) -> None:
    teacher = TinyNet(quantize=False)
    torch.manual_seed(0)
    train(tmp_path / "teacher", teacher, quiet(epochs=20, lr=0.05), dataset=NoisyData(256))
    before = copy.deepcopy(teacher.state_dict())
    noise = TensorDataset(NoisyData(256).inputs, torch.randint(0, 3, (256,)))
    scores = []
    config = quiet(epochs=16, lr=0.05, amax_mode="learned")
    for weight in (0.0, 0.95):
        torch.manual_seed(1)
        loss = distilled_loss(TASK, teacher, DistillConfig(weight, temperature=2.0))
        result = fine_tune(TinyNet(), make_loader(noise, 16, seed=1), loss, evaluate, config, tmp_path / str(weight))
        scores.append(result.history[-1]["metrics"]["accuracy"])
    print(scores, evaluate(teacher))
    assert evaluate(teacher)["accuracy"] > 0.9
    assert scores[0] < 0.7
    assert scores[1] > 0.85
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())


def test_features_pull_the_student_to_the_teacher_under_autocast(tmp_path: Path) -> None:
    teacher, student = TinyNet(quantize=False), TinyNet()
    start = (student.first(DATA.inputs) - teacher.first(DATA.inputs)).square().mean()
    loss = distilled_loss(TASK, teacher, DistillConfig(features=("first",), feature_weight=10.0))
    config = quiet(epochs=8, lr=0.05, mixed_precision="bf16")
    fine_tune(student, make_loader(NoisyData(64), 8), loss, lambda m: {"accuracy": 0.0}, config, tmp_path)
    student.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True)["model"])
    assert (student.first(DATA.inputs) - teacher.first(DATA.inputs)).square().mean() < 0.1 * start


def test_compiled_students_give_logits_and_refuse_features() -> None:
    teacher, student = TinyNet(quantize=False), TinyNet()
    expected = distilled_loss(TASK, teacher, DistillConfig(0.5))(student, BATCH)
    student.compile(backend="eager")
    torch.testing.assert_close(distilled_loss(TASK, teacher, DistillConfig(0.5))(student, BATCH), expected)
    with pytest.raises(ConfigError, match=r"cannot be read inside torch\.compile"):
        distilled_loss(TASK, teacher, DistillConfig(features=("first",)))(student, BATCH)


def test_errors() -> None:
    teacher = TinyNet(quantize=False)
    with pytest.raises(ConfigError, match=r"'frist' matches nothing in TinyNet\. Did you mean 'first'"):
        distilled_loss(TASK, teacher, DistillConfig(features=("frist",)))
    other = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(ConfigError, match=r"output has the tensors \[\(16, 4\)\] in the student and \[\(16, 3\)\]"):
        distilled_loss(TASK, teacher, DistillConfig(1.0))(other, BATCH)
    with pytest.raises(ConfigError, match="'first' matches nothing in Sequential"):
        distilled_loss(TASK, teacher, DistillConfig(features=("first",)))(other, BATCH)
    teacher.unused = nn.Linear(2, 2)
    student = TinyNet()
    student.unused = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"feature 'unused' has the tensors \[\] in the student"):
        distilled_loss(TASK, teacher, DistillConfig(features=("unused",)))(student, BATCH)
    for wrong in ({"weight": 1.5}, {"temperature": 0.0}, {"feature_weight": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DistillConfig(**wrong)  # type: ignore[arg-type]
    assert not DistillConfig(features=("a",), feature_weight=0.0).active
    assert DistillConfig(features=("a",)).active
