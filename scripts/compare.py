"""FP32, FP16, PTQ by each calibrator and QAT side by side on torch, ONNX Runtime and TensorRT.

    python scripts/compare.py --config configs/digits.yaml
    python scripts/compare.py --config configs/resnet50.yaml --data-dir /data/imagenet --batches=[1,8,64]

Runs the stages that are missing (float training, calibration, fine-tuning of the first seed) and reuses those that
qat_finetune.py has finished. Then accuracy, latency, throughput, sizes and INT8 coverage go into one table, and into
compare.json and compare.html in <output_dir>/compare. A cell that cannot run says why. Run again after an
interruption, it goes on. Exit code 1 if a file or engine is worse than its torch model by more than --threshold points.
"""

from __future__ import annotations

from _common import run_main
from recipes.cells import Measuring
from recipes.classification import Classification
from recipes.comparison import Comparison
from recipes.comparison_page import render_page, write_page
from recipes.comparison_table import LEGEND, make_table, problems, speed_warnings
from recipes.config import build_parser, parse


def main(args: list[str]) -> int:
    """Run it; 1 where an accuracy or tensorrt.min_int8 is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--batches", type=list[int] | None, help="batch sizes; default: 1 and data.eval_batch_size")
    parser.add_argument("--iterations", type=int, default=100, help="runs that count, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="limit of one latency on torch or ONNX Runtime")
    parser.add_argument("--compile", type=bool, default=False, help="time torch through torch.compile")
    config, options = parse(parser, args)
    batches = options.batches or sorted({1, config.data.eval_batch_size})
    how = Measuring(tuple(batches), options.iterations, options.seconds, options.compile)
    comparison = Comparison(Classification(config), how)
    comparison.fill()

    cells = comparison.cells
    warned, failed = speed_warnings(cells, comparison.inspections), problems(cells, config)
    table = make_table(cells, how.batches)
    comparison.save(warnings=warned, problems=failed)
    data = config.data
    title = f"{config.model.name} on {data.name}, {data.image_size} px"
    page = comparison.path.with_suffix(".html")
    write_page(page, render_page(cells, table, comparison.header, title, warned, failed))
    print(table.text(title))
    print("\n".join(LEGEND))
    for text in (*(f"WARNING: {w}" for w in warned), *(f"FAILED: {f}" for f in failed)):
        print(text)
    print(f"results: {comparison.path}\npage: {page}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
