from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from recipes.config import ModelConfig
from recipes.models import build_model, load_weights, read_checkpoint


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"module." + k: v for k, v in s.items()}]
)
def test_checkpoint_forms(tmp_path: Path, wrap: object) -> None:
    model = build_model(ModelConfig("resnet18"), 7)
    path = tmp_path / "model.pt"
    torch.save(wrap(model.state_dict()), path)  # type: ignore[operator]
    again = build_model(ModelConfig("resnet18", checkpoint=str(path)), 7)
    assert torch.equal(again.fc.weight, model.fc.weight)  # type: ignore[union-attr, arg-type]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'resnet50'"):
        build_model(ModelConfig("resnet05"), 10)
    with pytest.raises(ConfigError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(tmp_path / "bad.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ConfigError, match="holds no state dict"):
        read_checkpoint(tmp_path / "empty.pt")
    with pytest.raises(ConfigError, match="does not fit Linear"):
        load_weights(nn.Linear(2, 2), {"weight": torch.ones(3, 3)}, "x.pt")
    with pytest.raises(ConfigError, match=r"model.weights='V9'.*IMAGENET1K_V1"):
        build_model(ModelConfig("resnet18", weights="V9"), 10)


def test_options_reach_the_constructor() -> None:
    model = build_model(ModelConfig("mobilenet_v2", options={"width_mult": 0.5}), 4)
    assert model.classifier[1].out_features == 4  # type: ignore[index, union-attr]
    assert model.features[0][0].out_channels == 16  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match=r"model.options.*nonsense"):
        build_model(ModelConfig("mobilenet_v2", options={"nonsense": 1}), 4)


@pytest.mark.parametrize(("name", "side"), [("resnet50", 4), ("efficientnet_b0", 4), ("mobilenet_v2", 4)])
def test_undo_strides_keeps_the_resolution_and_the_weights(name: str, side: int) -> None:
    model = build_model(ModelConfig(name, undo_strides=2), 4).eval()
    maps: list[torch.Size] = []
    pool = model.avgpool if hasattr(model, "avgpool") else None
    last = pool or model.classifier
    last.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0].shape))  # type: ignore[union-attr, operator]
    model(torch.randn(1, 3, 32, 32))
    assert pool is None or maps[0][-2:] == (side, side)
    assert set(model.state_dict()) == set(build_model(ModelConfig(name), 4).state_dict())
    with pytest.raises(ConfigError, match="undo_strides=99"):
        build_model(ModelConfig(name, undo_strides=99), 4)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("executed",))


def test_checkpoints_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(tmp_path / "evil.pt")
    assert "executed" not in capsys.readouterr().out


def test_auxiliary_heads_count_in_the_loss() -> None:
    from recipes.classification import classification_loss

    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    plain: Tensor = classification_loss()(logits, labels)
    assert classification_loss()((logits, logits), labels) == pytest.approx(1.3 * plain.item())
    with_two = classification_loss()((logits, logits, logits), labels)
    assert with_two == pytest.approx(1.6 * plain.item())
