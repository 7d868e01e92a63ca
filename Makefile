# make setup   a virtual environment in .venv, CPU only, a minute or two
# make demo    train the demo model on 8 virtual CPU devices
# make test    the test suite
# make help    the rest

VENV ?= .venv
# The oldest jax that is supported, and the newest that is tested: each is written in one place.
OLDEST_JAX := $(shell sed -n 's/^dependencies = \["jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)
NEWEST_JAX := $(shell sed -n 's/^NEWEST_JAX = "\([0-9.]*\)"$$/\1/p' xen_moe_jax/_tested_jax.py)
JAX ?= $(OLDEST_JAX)
# PYTHON=/path/to/python3.12 for the interpreter that makes the environment

BIN := $(VENV)/bin
READY := $(VENV)/.ready
MAXTEXT := .venv-maxtext
PYTEST_ARGS ?=
# test processes side by side; each has 8 virtual devices
JOBS ?= 2
DEMO_ARGS ?=
BENCHMARK_ARGS ?= ops
BAZEL ?= bazel

CPP_FILES = $(shell git ls-files '*.cc' '*.cu' '*.cuh' '*.h')

# JAX finds no accelerator unless the caller names one: JAX_PLATFORMS=cuda make test
export JAX_PLATFORMS ?= cpu
# Tests start many processes: without compiled modules on disk each would compile jax anew, for many seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help versions setup transfer demo test test-thorough test-slow memory-test kernel-test maxtext-test lint format picture types docs doctor benchmark bazel-test wheel release clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: $(READY)  ## make the environment, with the oldest supported JAX

versions:  ## the oldest jax that is supported, and the newest that is tested
	@echo $(OLDEST_JAX) $(NEWEST_JAX)

# libtpu compiles the TPU kernels ahead of time for the tests. It stands beside the packages and not among them: JAX would
# look for a TPU in every program of this environment, and say so on standard error.
LIBTPU = import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))

# What every platform without a wheel of its own takes.
PURE_WHEEL = XEN_MOE_CUDA=OFF $(BIN)/python -m pip wheel --no-deps --no-build-isolation dist/*.tar.gz

# Most modules of these packages are never imported: each is compiled when it is.
$(READY): pyproject.toml
	python=$$(PYTHON="$(PYTHON)" tools/find_python.sh) && $$python -m venv $(VENV)
	XEN_MOE_CUDA=OFF $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  "jax==$(JAX)" "jaxlib==$(JAX)" --editable '.[dev]'
	if [ "$$(uname -s)" = Linux ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/libtpu \
	    "$$($(BIN)/python -c '$(LIBTPU)')"; fi
	if command -v c++ >/dev/null; then $(BUILD_TRANSFER); \
	  else echo "xen_moe_jax.transfer is left without its compiled part: no C++ compiler (c++) was found"; fi
	touch $@

# In place: the environment imports the checkout.
BUILD_TRANSFER = $(BIN)/cmake -S . -B build/transfer -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DXEN_MOE_CUDA=OFF && $(BIN)/cmake --build build/transfer && \
	  $(BIN)/cmake --install build/transfer --prefix .

transfer: $(READY)  ## the compiled part of xen_moe_jax.transfer, in place (make setup does it, too): needs a C++ compiler
	$(BUILD_TRANSFER)

demo: $(READY)  ## train a small MoE language model, check it, draw its curves
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

# Every test is in exactly one of the six selections below, by its marks: tests/tools/test_selections.py holds them to it.
RUN_TESTS = tools/run_tests.sh $(BIN)/python
MEMORY_TESTS = tests/ffi/test_memory.py tests/ffi/test_memory_nodes.py tests/ffi/test_nccl.py tests/ffi/test_processes.py

test: $(READY)  ## the test suite: minutes. What is slow, thorough, C++ alone or another library's has the five targets below
	$(RUN_TESTS) "not slow and not thorough and not kernels and not memory and not clients" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-thorough: $(READY)  ## the long ones that CI runs too: further members of the families of make test
	$(RUN_TESTS) "thorough and not slow and not clients" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(READY)  ## what all others leave out: an hour or more
	$(RUN_TESTS) "slow and not clients" -n $(JOBS) --dist worksteal -o faulthandler_timeout=7200 $(PYTEST_ARGS)

kernel-test: $(READY)  ## the CUDA kernels on host threads, and the networks that they are tested over: C++, no CUDA, no GPU
	$(BIN)/python -m pytest tests/native -m "kernels and not slow and not thorough" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Compiled in a hurry: none of it runs for long.
memory-test: $(READY)  ## symmetric memory over host memory, agreement, liveness, NCCL's place taken: no CUDA, no GPU
	$(BIN)/cmake -S . -B build/memory -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DXEN_MOE_MEMORY_TEST=ON -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG"
	$(BIN)/cmake --build build/memory
	$(BIN)/python -m pytest $(MEMORY_TESTS) -m "memory and not slow and not thorough" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

maxtext-test: $(MAXTEXT)/.ready  ## MaxText trains with this library: minutes, and 1.5 GB in an environment of its own
	PYTHONPATH=. XLA_FLAGS="$$XLA_FLAGS --xla_cpu_enable_concurrency_optimized_scheduler=false" \
	  $(MAXTEXT)/bin/python -m pytest tests/clients -m "clients" $(PYTEST_ARGS)

$(MAXTEXT)/.ready: tests/clients/maxtext_requirements.txt pyproject.toml
	python=$$(PYTHON="$(PYTHON)" tools/find_python.sh) && $$python -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  "jax==$(JAX)" "jaxlib==$(JAX)" -r tests/clients/maxtext_requirements.txt
	touch $@

lint: $(READY)  ## ruff, the layers of imports, and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=. $(BIN)/lint-imports --no-cache
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))

format: $(READY)  ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

picture: $(READY)  ## docs/images: the house, drawn from the real imports by graphviz, and the charts of the result files
	$(BIN)/import-linter drawgraph xen_moe_jax | tred | dot -Tsvg -o docs/images/house.svg
	$(BIN)/python tools/draw_charts.py

types: $(READY)  ## mypy
	$(BIN)/mypy

docs: $(READY)  ## the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

doctor: $(READY)  ## what this machine has, and which backend each platform would use
	$(BIN)/xen-moe-jax doctor

benchmark: $(READY)  ## dispatch and combine beside other ways (BENCHMARK_ARGS="MODE ...")
	$(BIN)/python -m benchmarks $(BENCHMARK_ARGS)

bazel-test: $(READY)  ## the tests and benchmarks under Bazel, offline
	$(BAZEL) test //tests/... //benchmarks/...

wheel: $(READY)  ## the sdist and a manylinux wheel with the CUDA modules in dist/, checked (nvcc comes from PyPI; minutes)
	rm -rf dist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	XEN_MOE_CUDA=ON XEN_MOE_NVSHMEM=ON $(BIN)/python -m pip wheel --no-deps --wheel-dir dist/built dist/*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libnvshmem_host.so.*' --wheel-dir dist dist/built/*.whl
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/abi3audit --strict dist/*.whl
	$(PURE_WHEEL) --wheel-dir dist/pure
	$(BIN)/check-wheel-contents dist/pure/*.whl
	$(BIN)/python -m cibuildwheel --platform linux --print-build-identifiers
	XEN_MOE_WHEEL=$$(echo dist/*.whl) XEN_MOE_WHEEL_CUDA=1 $(BIN)/python -m pytest -q -o faulthandler_timeout=2700 --durations=4 -rP tests/tools/test_wheel.py

release: $(READY)  ## the sdist and the wheels of all platforms in dist/ (needs docker, and QEMU for a foreign one)
	rm -rf dist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(PURE_WHEEL) --wheel-dir dist
	$(BIN)/python -m cibuildwheel --platform linux --output-dir dist dist/*.tar.gz
	$(BIN)/check-wheel-contents dist/*.whl

clean:  ## what the build and the tests leave behind
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
