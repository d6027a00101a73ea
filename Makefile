# Everything runs in .venv of this checkout. No target needs root, or any network but the package registry.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: setup demo test lint bench clean

setup: .venv/.ready

# torch goes first and alone, pinned: any later package that asks for torch then finds it and does not bring another build.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/gradfilter train --config examples/digits.yaml --exact --out runs/digits-exact --overwrite
	$(BIN)/gradfilter train --config examples/digits.yaml --out runs/digits --beside runs/digits-exact --overwrite

test: setup
	$(BIN)/python -m pytest -n $(WORKERS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup
	$(BIN)/gradfilter bench

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis build dist
