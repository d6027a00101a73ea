# Everything runs in .venv of this checkout. No target needs root, or any network but the package registry.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
MINUTES ?= 10

.PHONY: setup native sanitize demo test test-torch fuzz lint bench clean

setup: .venv/.ready

# torch goes first and alone, pinned: any later package that asks for torch then finds it and does not bring another build.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# The C library alone, after a change of its sources.
native:
	cmake -S src/gradfilter/ops/native -B build/native
	cmake --build build/native
	cp build/native/libgradfilter.so src/gradfilter/ops/native/

# Its tests under the address and undefined-behaviour sanitizers. Python itself leaks on leaving: leaks are not looked for.
# torch's exceptions need the C++ library beside the sanitizer's.
sanitize: setup
	cmake -S src/gradfilter/ops/native -B build/sanitize -DSANITIZE=ON
	cmake --build build/sanitize
	LD_PRELOAD="$$($${CC:-cc} -print-file-name=libasan.so) $$($${CC:-cc} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 GRADFILTER_NATIVE_LIBRARY=build/sanitize/libgradfilter.so \
	$(BIN)/python -m pytest -q tests/test_native.py tests/test_native_conv.py tests/test_native_expand.py tests/test_native_pool.py \
	  tests/test_native_norm.py tests/test_native_views.py tests/test_native_tasks.py tests/test_operators.py tests/test_twin.py

demo: setup
	$(BIN)/gradfilter train --config examples/digits.yaml --exact --out runs/digits-exact --overwrite
	$(BIN)/gradfilter train --config examples/digits.yaml --out runs/digits --beside runs/digits-exact --overwrite

test: setup
	$(BIN)/python -m pytest -n $(WORKERS)

# All of it as it runs where the C library was not built; the tests of the library itself are skipped.
test-torch: setup
	GRADFILTER_NATIVE=0 $(BIN)/python -m pytest -n $(WORKERS)

# New examples, round after round, for the tests that Hypothesis drives. It prints how to repeat what fails.
fuzz: setup
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES) --workers $(WORKERS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup
	$(BIN)/gradfilter bench

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis build dist
