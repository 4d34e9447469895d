import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.calibration import CalibrationReport, collect_stats, compare_methods, compute_amax, use_histograms
from qat.errors import CalibrationError
from qat.quantizer import QuantizerState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return y


def quantized(exclude: tuple[str, ...] = ("unused",)) -> Net:
    torch.manual_seed(0)
    net = Net()
    qat.quantize_(net, exclude=exclude)
    return net


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("method", ["max", "entropy", "mse", "percentile", "percentile=99.5"])
def test_calibrate_sets_every_amax(method: str) -> None:
    net = quantized()
    report = qat.calibrate(net, batches(), method, progress=False)
    assert report == CalibrationReport(method, 4, {}, ())
    largest = max(float(b.abs().max()) for b in batches())
    amax = net.first._input_quantizer.amax.item()
    assert (amax == largest) if method == "max" else (0.3 * largest < amax <= largest)
    assert torch.equal(net.first._weight_quantizer.amax, net.first.weight.detach().abs().amax(1))


def test_statistics_are_those_of_the_float_model_in_eval_mode() -> None:
    net = quantized().train()
    running = net.norm.running_mean.clone()
    want = torch.stack([torch.relu(Net.forward(_passing(net), b)).abs().max() for b in batches()])
    assert want.isfinite().all()
    qat.calibrate(net, batches(), "max", progress=False)
    assert torch.equal(net.norm.running_mean, running)
    assert net.training
    assert net.norm.training


def _passing(net: Net) -> Net:
    import copy

    twin = copy.deepcopy(net).eval()
    qat.set_quantizer_state(twin, QuantizerState.PASSTHROUGH)
    return twin


def test_second_calibration_forgets_the_first() -> None:
    net = quantized()
    qat.calibrate(net, [100 * b for b in batches()], progress=False)
    qat.calibrate(net, batches(), progress=False)
    assert net.first._input_quantizer.amax.item() == max(float(b.abs().max()) for b in batches())


def test_unseen_layers_are_named_or_left_float() -> None:
    """Kind: layer never seen in calibration (YOLOv6#879)."""
    net = quantized(exclude=())
    with pytest.raises(CalibrationError, match=r"unused._input_quantizer, unused._weight_quantizer"):
        qat.calibrate(net, batches(), progress=False)
    report = qat.calibrate(net, batches(), unseen="float", progress=False)
    assert report.unseen == ("unused._input_quantizer", "unused._weight_quantizer")
    assert net.unused._input_quantizer.state is QuantizerState.PASSTHROUGH
    assert "no tensor reached it" in str(qat.summary(net))
    net.forward = lambda x: net.unused(net.first(x))  # type: ignore[method-assign]
    later = qat.calibrate(net, batches(), unseen="float", progress=False)
    assert later.unseen == ("second._input_quantizer", "second._weight_quantizer")


def test_nan_names_layer_and_batch() -> None:
    bad = batches()
    bad[2][3, 1] = math.nan
    with pytest.raises(CalibrationError, match=r"first._input_quantizer.*batch 2"):
        qat.calibrate(quantized(), bad, "entropy", progress=False)


def test_dead_layers_are_listed() -> None:
    net = quantized()
    net.second.weight.data[1] = 0
    report = qat.calibrate(net, batches(), progress=False)
    assert report.dead == {"second._weight_quantizer": [1]}
    assert net(batches()[0]).isfinite().all()


def test_states_come_back_after_an_error() -> None:
    net = quantized()
    net.first._input_quantizer.set_state(QuantizerState.PASSTHROUGH, "wanted")
    with pytest.raises(RuntimeError, match="shapes"):
        collect_stats(net, [torch.ones(2, 5)], progress=False)
    states = {name: q.state for name, q in qat.named_quantizers(net)}
    assert states["first._input_quantizer"] is QuantizerState.PASSTHROUGH
    assert states["second._input_quantizer"] is QuantizerState.QUANTIZING


def test_layer_left_float_on_purpose_stays_float() -> None:
    net = quantized()
    net.first._input_quantizer.set_state(QuantizerState.PASSTHROUGH, "wanted")
    report = qat.calibrate(net, batches(), progress=False)
    assert report.quantizers == 3
    assert not net.first._input_quantizer.calibrated


def test_batches_may_be_pairs_mappings_or_need_a_forward() -> None:
    plain = quantized()
    qat.calibrate(plain, batches(), progress=False)
    for form in ([(b, torch.zeros(16)) for b in batches()], [{"x": b} for b in batches()]):
        net = quantized()
        qat.calibrate(net, form, progress=False)
        assert torch.equal(net.second._input_quantizer.amax, plain.second._input_quantizer.amax)
    net = quantized()
    assert collect_stats(net, batches(), num_batches=2, forward=lambda m, b: m(2 * b), progress=False) == 2


def test_no_batches_and_no_quantizers() -> None:
    with pytest.raises(CalibrationError, match="no calibration batches"):
        qat.calibrate(quantized(), [], progress=False)
    with pytest.raises(CalibrationError, match="no quantizers"):
        qat.calibrate(Net(), batches(), progress=False)
    with pytest.raises(CalibrationError, match="'kl' is unknown"):
        qat.calibrate(quantized(), batches(), "kl", progress=False)


def test_compare_collects_once_and_keeps_the_best() -> None:
    net = quantized()
    use_histograms(net)
    collect_stats(net, batches(), progress=False)
    seen: list[float] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(net.first._input_quantizer.amax.item())
        return {"score": -abs(seen[-1] - target)}

    compute_amax(net, "mse")
    target = net.first._input_quantizer.amax.item()
    results = compare_methods(net, evaluate, "score")
    assert [r.method for r in results] == ["max", "entropy", "mse", "percentile"]
    assert len(seen) == 4
    assert net.first._input_quantizer.amax.item() == target


def test_summary_as_table_and_json() -> None:
    net = quantized()
    assert "not" not in str(qat.summary(net)).split("\n")[0]
    qat.calibrate(net, batches(), progress=False)
    summary = qat.summary(net)
    values = json.loads(json.dumps(summary.to_dict()))
    row = values["quantizers"][0]
    assert row["name"] == "first._input_quantizer"
    assert row["scale"][0] == pytest.approx(row["amax"][0] / 127)
    assert values["left_float"] == {"unused": "excluded by 'unused'"}
    for text in ("first._weight_quantizer", "quantizing", "excluded by 'unused'"):
        assert text in str(summary)


WORKER = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_calibration import quantized, batches
import qat
dist.init_process_group("gloo")
rank = dist.get_rank()
for method in ("max", "entropy", "mse", "percentile"):
    net = quantized()
    qat.calibrate(net, batches(5)[rank::2], method, progress=False)
    if rank == 0:
        print(method, [q.amax.double().sum().item() for _, q in qat.named_quantizers(net)], flush=True)
dist.destroy_process_group()
"""


def test_sharded_calibration_equals_one_process(tmp_path: Path) -> None:
    """Kind: distributed calibration (TensorRT#2920): same amax, bit for bit, for every method."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    run = subprocess.run(
        [*command, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    for method in ("max", "entropy", "mse", "percentile"):
        net = quantized()
        qat.calibrate(net, batches(5), method, progress=False)
        assert json.loads(lines[method]) == [q.amax.double().sum().item() for _, q in qat.named_quantizers(net)]


def test_a_weight_is_looked_at_once_and_again_after_a_change() -> None:
    net = quantized()
    collect_stats(net, batches(), progress=False)
    calibrator = net.first.weight_quantizer.calibrator
    seen: list[int] = []
    update = calibrator.update
    calibrator.update = lambda x: (seen.append(1), update(x))[1]
    with qat.calibration.calibrating(net):
        for _ in range(3):
            net(batches()[0])
        assert not seen
        with torch.no_grad():
            net.first.weight[2].mul_(10)
        net(batches()[0])
    assert len(seen) == 1
    qat.compute_amax(net, "max")
    assert torch.equal(net.first.weight_quantizer.amax, net.first.weight.abs().amax(1).detach())
    collect_stats(net, batches(), progress=False)
    assert len(seen) == 2, "statistics that start afresh need the weight again"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y: Tensor = self.head(self.conv(x) + x)
        return y


def test_a_tensor_with_several_readers_is_counted_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    block = Block().eval()
    qat.prepare(block, x)
    use_histograms(block)
    shared = {q for _, q in qat.named_quantizers(block) if q.last_result is not None}
    assert shared
    for _ in range(2):  # the same batch again: statistics start afresh
        collect_stats(block, [x], progress=False)
        for quantizer in shared:
            counts, _width = quantizer.calibrator.histogram()
            assert counts.sum() == 2 * 32 * 8 * 8
    collect_stats(block, [x, x.clone(), x], progress=False)
    assert all(q.calibrator.histogram()[0].sum() == 3 * 2 * 32 * 8 * 8 for q in shared)
