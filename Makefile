# make train: install and run the main job.  make test: install and pass the tests.

PYTHON := $(shell for p in python3.12 python3.13 python3.14 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python); do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
RUN := .venv/bin/python -m
export JAX_PLATFORMS ?= cpu
# Big pages for the CPU backend's buffers: 4,325 against 2,819 tokens/s at step 10 of the main job, when freed memory was not yet kept
# (moejax train configs/tiny_hybrid.py --train.steps 20 with and without, two cores of an AMD EPYC, 2026-11-29).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: install train test test-slow test-aot bench bench-gpu lint format clean

install: .venv/installed

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "moejax needs Python >= 3.12; none of python3.12, python3.13, python3 or pyenv's is." >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

train: install
	.venv/bin/moejax train configs/tiny_hybrid.py

test: install
	$(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not aot" --durations=15

test-slow: install
	$(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow --durations=15

.venv/installed-plan: .venv/installed
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev,plan]'
	@touch $@

.venv/installed-gpu: .venv/installed
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev,gpu]'
	@touch $@

test-aot: .venv/installed-plan
	$(RUN) pytest -n 2 -m aot --durations=15

bench: install
	.venv/bin/python kernels/bench/run.py

# Other libraries share the GPU: JAX must not take its memory beforehand.
bench-gpu: .venv/installed-gpu
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false .venv/bin/python kernels/bench/gpu.py

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright

format: install
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean:
	rm -rf .venv .cache runs build *.egg-info
