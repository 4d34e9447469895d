# make demo: environment, then the whole walk on data that comes with the dependencies.
# make compare: FP32, FP16, PTQ and QAT side by side on torch, ONNX Runtime and TensorRT, after the same walk.
# make test: environment, then linting, types and tests.
# make docs: environment, then guides and API reference as a site in site/; a broken link fails it.
PYTHON ?= python3
# Where a GPU runs TensorRT proper: make demo EXTRAS=dev,tensorrt
EXTRAS ?= dev,tensorrt-rtx
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo compare test lint docs clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/.ready
	$(RUN) scripts/qat_finetune.py --config configs/digits.yaml

compare: $(VENV)/.ready
	$(RUN) scripts/compare.py --config configs/digits.yaml

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs site
