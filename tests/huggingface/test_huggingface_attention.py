"""Encoders of transformers: every architecture's linears, adds and attention; nothing is skipped unnoticed."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat import huggingface
from qat.errors import CalibrationError, ConfigError
from qat.onnx import assert_clean
from qat.quantizer import QuantizerState
from qat.runtime import OnnxRuntimeRunner

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")
COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
CONFIGS = {
    "bert": transformers.BertConfig(**COMMON, vocab_size=99, max_position_embeddings=64),
    "roberta": transformers.RobertaConfig(**COMMON, vocab_size=99, max_position_embeddings=66),
    "electra": transformers.ElectraConfig(**COMMON, embedding_size=64, vocab_size=99, max_position_embeddings=64),
    "distilbert": transformers.DistilBertConfig(
        dim=64, n_layers=2, n_heads=2, hidden_dim=128, vocab_size=99, max_position_embeddings=64
    ),
}


def make(kind: str, length: int = 24) -> tuple[nn.Module, dict[str, Tensor]]:
    """A random encoder and a batch whose second sequence is padded."""
    torch.manual_seed(0)
    model = transformers.AutoModelForQuestionAnswering.from_config(copy.deepcopy(CONFIGS[kind])).eval()
    ids = torch.randint(5, 99, (2, length))
    mask = torch.ones_like(ids)
    ids[1, length - 7 :], mask[1, length - 7 :] = CONFIGS[kind].pad_token_id, 0
    return model, {"input_ids": ids, "attention_mask": mask}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Start logits of tokens that are no padding."""
    with torch.no_grad():
        return model(**batch).start_logits[batch["attention_mask"].bool()]


def prepared(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = make(kind)
    huggingface.prepare(model, batch)
    qat.calibrate(model, [batch], forward=huggingface.run_unpadded, progress=False)
    return model, batch


@pytest.mark.parametrize("kind", CONFIGS)
def test_linears_attention_and_residual_adds_are_quantized(kind: str) -> None:
    model, batch = make(kind)
    before = logits(model, batch)
    huggingface.prepare(model, batch)
    summary = qat.summary(model)
    names = [row.name for row in summary.quantizers]
    readers = {reader for row in summary.quantizers for reader in row.readers}
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "qa_outputs"]
    assert len(linears) == 12 and {f"{name}._weight_quantizer" for name in linears} <= set(names)
    parts = [name.rpartition("._attention.")[2] for name in names if "core_attention" in name]
    assert sorted(parts) == sorted(2 * ["_query_quantizer", "_key_quantizer", "_softmax_quantizer", "_value_quantizer"])
    adds = [reader for reader in readers if reader.rpartition(".")[2].startswith("add")]
    assert len(adds) == 4, "two residual adds a layer"
    assert not any("embedding" in name for name in names)
    assert "qa_outputs" in summary.left_float
    # Context and identity share the quantizer of the linear layer that reads them: none of their own.
    assert len(names) == 2 * (6 + 4 + 4)
    for _, quantizer in qat.named_quantizers(model):
        quantizer.set_state(QuantizerState.PASSTHROUGH)
    assert torch.equal(logits(model, batch), before)


def test_other_attention_implementations_are_left_float_and_that_is_said() -> None:
    for implementation in ("sdpa", "eager"):
        model, batch = make("bert")
        model.set_attn_implementation(implementation)
        reasons = qat.summary(qat.prepare(model, batch)).left_float
        assert sum("attention.self." in name for name in reasons) == (2 if implementation == "sdpa" else 4)


def test_a_kernel_that_would_skip_the_quantizers_is_refused() -> None:
    model, batch = prepared("bert")
    quantized = logits(model, batch)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="was set to 'sdpa' after the model was prepared"):
        model(**batch)
    model.set_attn_implementation(huggingface.ATTENTION)
    assert torch.equal(logits(model, batch), quantized)


def test_attention_over_512_tokens_or_excluded_stays_float_as_a_whole() -> None:
    config = transformers.BertConfig(**COMMON, vocab_size=99, max_position_embeddings=520)
    model = transformers.BertForQuestionAnswering(config).eval()
    huggingface.prepare(model, {"input_ids": torch.ones(1, 513, dtype=torch.long)})
    summary = qat.summary(model)
    assert not any("core_attention" in row.name for row in summary.quantizers)
    assert any("513 tokens" in reason for reason in summary.left_float.values())
    model, batch = make("bert")
    huggingface.prepare(model, batch, exclude="*.core_attention*")
    assert not any("core_attention" in row.name for row in qat.summary(model).quantizers)


def test_attention_is_computed_as_in_transformers_with_fixed_softmax_scale() -> None:
    model, batch = prepared("bert")
    softmax = [q for name, q in qat.named_quantizers(model) if name.endswith("_softmax_quantizer")]
    assert [float(q.amax) for q in softmax if q.amax is not None] == [1.0, 1.0]
    reference, _ = make("bert")
    difference = (logits(model, batch) - logits(reference, batch)).abs().max()
    assert 0 < difference < 0.1 * logits(reference, batch).abs().max()


def test_copies_pickles_and_loads() -> None:
    model, batch = prepared("distilbert")
    expected = logits(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, batch), expected)
    fresh, _ = make("distilbert")
    huggingface.prepare(fresh, batch)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh, batch), expected)


def test_gradients_reach_every_weight_under_autocast() -> None:
    model, batch = prepared("bert")
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    (output.start_logits.float().square().mean() + output.end_logits.float().square().mean()).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None and "position" not in name]
    assert not missing


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_the_file_takes_any_batch_and_length(kind: str, tmp_path: Path) -> None:
    model, batch = prepared(kind)
    path = tmp_path / "model.onnx"
    shapes = {name: {0: "batch", 1: "sequence"} for name in batch}
    names = ("start_logits", "end_logits")
    report = qat.export(model, batch, path, opset=20, dynamic_shapes=shapes, output_names=names)
    assert report.input_names == tuple(batch) and report.output_names == names and not report.unused
    other = {name: torch.cat([t, t])[:3, :11] for name, t in batch.items()}
    assert qat.check_parity(model, path, [other]).passed
    assert_clean(path)
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert {"Gelu", "LayerNormalization", "Softmax", "QuantizeLinear"} <= operators
    arrays = {name: t.numpy() for name, t in other.items()}
    fast, literal = (OnnxRuntimeRunner(path, reference=r).run(arrays) for r in (False, True))
    kept = arrays["attention_mask"].astype(bool)
    assert (
        np.abs(fast["start_logits"] - literal["start_logits"])[kept].max()
        < 0.05 * np.abs(literal["start_logits"]).max()
    )


def test_padding_does_not_take_part_in_calibration() -> None:
    model, batch = make("bert")
    huggingface.prepare(model, batch)
    alone = [{name: tensor[:1] for name, tensor in batch.items()}]
    alone += [{name: tensor[1:, :17] for name, tensor in batch.items()}]
    amax = []
    for batches, forward in (([batch], huggingface.run_unpadded), (alone, qat.calibration.run_batch), ([batch], None)):
        options = {} if forward is None else {"forward": forward}
        qat.calibrate(model, batches, progress=False, **options)
        amax.append(torch.cat([q.amax.flatten() for _, q in qat.named_quantizers(model)]))
    torch.testing.assert_close(amax[0], amax[1])
    assert not torch.allclose(amax[0], amax[2]), "padding has a wider range somewhere, or this test shows nothing"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "no attention_mask"),
        ([[0, 1, 1]], "padding in front of tokens"),
        ([[1, 0, 1]], "padding in front of tokens"),
        ([[0, 0, 0]], "is empty"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(mask: Any, message: str) -> None:
    batch = {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    if mask is not None:
        batch["attention_mask"] = torch.tensor(mask)
    with pytest.raises(CalibrationError, match=message):
        huggingface.run_unpadded(nn.Identity(), batch)


def test_decoders_are_refused() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=99, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    with pytest.raises(ConfigError, match="not an encoder"):
        huggingface.prepare(model, {"input_ids": torch.ones(1, 8, dtype=torch.long)})
