# make setup   a virtual environment in .venv, CPU only, a minute or two
# make demo    train the demo model on 8 virtual CPU devices
# make test    the test suite
# make help    the rest

VENV ?= .venv
JAX ?= 0.11.2
# PYTHON=/path/to/python3.12 for the interpreter that makes the environment

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCHMARK_ARGS ?= --mode normal
BAZEL ?= bazel

CORE_TESTS = $(addprefix tests/test_,conformance_reference.py contract.py errors.py examples.py gradients.py modes.py \
  multiprocess.py properties.py routing.py)
CPP_FILES = $(shell git ls-files '*.cc' '*.cu' '*.cuh' '*.h')

# JAX finds no accelerator unless the caller names one: JAX_PLATFORMS=cuda make test
export JAX_PLATFORMS ?= cpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-core lint format types doctor benchmark memory-test bazel-test wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: $(READY)  ## make the environment (JAX=0.12.0.1 VENV=.venv-newest for another JAX)

$(READY): pyproject.toml
	python=$$(PYTHON="$(PYTHON)" tools/find_python.sh) && $$python -m venv $(VENV)
	XEN_MOE_CUDA=OFF $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  "jax==$(JAX)" "jaxlib==$(JAX)" --editable '.[dev]'
	touch $@

demo: $(READY)  ## train a small MoE language model, check it, draw its curves
	$(BIN)/xen-moe-jax demo $(DEMO_ARGS)

test: $(READY)  ## the test suite, but for the tests marked slow
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(READY)  ## what make test leaves out: an hour or more
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-core: $(READY)  ## contract, conformance, gradients and errors: what another version of JAX could break
	$(BIN)/python -m pytest -m "not slow" $(CORE_TESTS) $(PYTEST_ARGS)

lint: $(READY)  ## ruff and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))

format: $(READY)  ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

types: $(READY)  ## mypy
	$(BIN)/mypy

doctor: $(READY)  ## what this machine has, and which backend each platform would use
	$(BIN)/xen-moe-jax doctor

benchmark: $(READY)  ## dispatch and combine against their peers (BENCHMARK_ARGS=...)
	$(BIN)/xen-moe-jax benchmark $(BENCHMARK_ARGS)

memory-test: $(READY)  ## symmetric memory over host memory, agreement, liveness: no CUDA, no GPU
	$(BIN)/cmake -S . -B build/memory -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DXEN_MOE_MEMORY_TEST=ON
	$(BIN)/cmake --build build/memory
	$(BIN)/python -m pytest tests/test_cuda_memory.py tests/test_cuda_processes.py $(PYTEST_ARGS)

bazel-test: $(READY)  ## the tests and benchmarks under Bazel, offline
	$(BAZEL) test //tests/... //benchmarks/...

wheel:  ## a wheel with the CUDA modules in dist/ (nvcc comes from PyPI; XEN_MOE_CUDA=OFF for a pure Python one)
	python=$$(PYTHON="$(PYTHON)" tools/find_python.sh) && $$python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## what the build and the tests leave behind
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
