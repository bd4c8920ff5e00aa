# The entry to everything. The environment goes to .venv, builds to build/, results to out/; a second run does only what changed.
#   PYTHON=python3.12 make test     another interpreter (after `make clean`)
#   JOBS=1 make test                fewer compilers at once
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)
RUNS ?= 20
SWEEPS ?= main oversubscribed torch collectives allocator
TORCH := 2.13.0
# Of a wheel: the minor versions of torch that it serves; `make wheel TORCHES=` is for the torch of .venv alone.
TORCHES ?= $(shell sed -n 's/^torch = //p' pyproject.toml | tr -d '",[]')
VENV := .venv
DIST ?= dist
STAMPS := $(VENV)/stamps
# The environment's own tools come first, by their absolute path: recipes need no activation.
BIN := $(CURDIR)/$(VENV)/bin
INSIDE := PATH="$(BIN):$$PATH" MAX_JOBS=$(JOBS) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTHON_FILES := python tests examples benchmarks docs csrc/bindings setup.py
CPP_FILES = $(shell find csrc tests benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu')
# setup.py's.
BUILD = build/$$($(BIN)/python -c "import sys; print(sys.implementation.cache_tag)")
PYTEST := python -m pytest --maxfail=10 --durations=10 --durations-min=2
SAY = @printf '\n== %s\n'

# An importable torch of the range that pyproject.toml names is used as it is.
FITTING_TORCH := import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert (2, 11) <= v <= (2, 15)
FITTING_PYTHON := import sys; sys.exit(0 if sys.version_info >= (3, 10) else 1)

.PHONY: help demo test test-all test-one test-repeat coverage test-launchers test-frameworks test-wheel mutants conformance bench check peers wheel sdist site lint format docs-pictures clean browser
.PHONY: extension install emulated-device gpu-check cpp-test python-test sanitizers asan tsan

help:
	@echo "make demo           train a small model on 2 local ranks in five ways, and compare"
	@echo "make test           build, then run the C++ tests and the fast Python tests"
	@echo "make test-all       the same with all Python tests"
	@echo "make test-one T=ring         build, then run the tests of one algorithm, test file or part of a name"
	@echo "make test-repeat RUNS=20     make test's Python tests so often beside busy loops, and which ever failed"
	@echo "make coverage                line and branch coverage of csrc and python, by suite of tests (an hour)"
	@echo "make test-launchers          install Slurm, Ray and the MPI libraries, and launch with them"
	@echo "make test-frameworks         install DeepSpeed, Accelerate, Lightning and transformers, and train with them"
	@echo "make test-wheel              build the wheel for every torch, and try it with the oldest and the newest"
	@echo "make mutants                 put seeded faults into the code, and see that the tests find each"
	@echo "make gpu-check PARTS=virtual   test and measure on a machine with an NVIDIA GPU; then PARTS=ranks (docs/gpu.md)"
	@echo "make conformance    torch's own suite for backends, on ringlet at worlds 2, 4 and 8 (docs/conformance.md)"
	@echo "make check          lint, then the C++ tests under ASan + UBSan and under TSan"
	@echo "make bench          the full benchmark against gloo and the MPI peers, to out/"
	@echo "make peers          install the MPI libraries to compare with, to .venv-peers/"
	@echo "make lint           ruff, clang-format and mypy"
	@echo "make format         what of lint can be put right by itself"
	@echo "make docs-pictures  draw docs/pictures/ again, and the tables of the pages"
	@echo "make wheel          a wheel for $(TORCHES) of torch, to dist/; TORCHES= for this torch alone"
	@echo "make sdist          the sources as an archive that pip installs, to dist/"
	@echo "make site           the pages and the reference of the Python API as a site, to out/site/"
	@echo "make clean          remove what all of these made"

demo: install
	$(SAY) "demo"
	@$(INSIDE) python examples/demo.py

# What a change most likely breaks. The rest, which starts launchers, hosts and benchmarks, is test-all's.
test: CHOSEN := not slow and
test: export RINGLET_FEW_CASES := 1
test: cpp-test python-test

test-all: browser cpp-test python-test

# T: an algorithm, a C++ test or a word of the Python tests' names.
ALGORITHM = $(wildcard csrc/schedule/$(T).cc)
CPP_SUITES = $(if $(ALGORITHM),schedule plan pull message,$(basename $(patsubst %_test.cc,%,$(notdir $(wildcard tests/cpp/$(T)_test.cc)))))
PYTHON_SUITES = $(if $(ALGORITHM),tests/core/test_schedule.py tests/core/test_prove.py tests/core/test_topology.py)
test-one: install
	@test -n "$(T)" || { echo "say which: make test-one T=ring" >&2; exit 1; }
	$(SAY) "tests of $(T)"
	@suites="$(CPP_SUITES)"; test -z "$$suites" || { \
	  $(INSIDE) cmake -DRINGLET_TESTING=ON $(BUILD) > /dev/null; \
	  $(INSIDE) cmake --build $(BUILD) --target $(CPP_SUITES:%=%_test); \
	  $(INSIDE) ctest --test-dir $(BUILD) -j 2 --output-on-failure -R "^($${suites// /|})$$"; }
	@$(INSIDE) $(PYTEST) -m 'not slow' -k '$(T)' $(PYTHON_SUITES) || { [ $$? = 5 ] && test -n "$(CPP_SUITES)"; }

coverage: install $(STAMPS)/coverage
	$(SAY) "coverage"
	@$(INSIDE) python tests/measure_coverage.py $(ARGUMENTS)

test-repeat: install emulated-device
	@$(INSIDE) python tests/repeat.py --runs $(RUNS) $(ARGUMENTS)

# What the suite skips where it is not installed. Nothing may skip itself here.
test-launchers: install peers $(STAMPS)/slurm $(STAMPS)/launchers
	$(SAY) "launchers: Slurm, Ray, the MPI libraries"
	@RINGLET_TEST_NO_SKIPS=1 $(CURDIR)/.venv-launchers/bin/python -m pytest --durations=10 \
	  tests/core/test_slurm.py tests/core/test_launching.py

test-frameworks: install $(STAMPS)/frameworks
	$(SAY) "frameworks: two ranks train as on gloo"
	@PATH="$(CURDIR)/.venv-frameworks/bin:$$PATH" python -m pytest --durations=10 tests/frameworks

# Nothing may skip itself here either.
test-wheel: install $(STAMPS)/wheel $(STAMPS)/torch-$(firstword $(TORCHES)) $(STAMPS)/torch-$(lastword $(TORCHES))
	$(SAY) "the wheel, with torch $(firstword $(TORCHES)) and $(lastword $(TORCHES)), and the sources"
	@$(INSIDE) RINGLET_TEST_NO_SKIPS=1 $(PYTEST) --durations=10 -o faulthandler_timeout=3600 tests/tools/test_wheel.py

mutants: install
	$(SAY) "seeded faults"
	@$(INSIDE) python tests/mutants/run.py $(ARGUMENTS)

conformance: install $(STAMPS)/conformance
	$(SAY) "torch's suite for backends"
	@$(INSIDE) python tests/conformance/run.py

bench: install peers
	$(SAY) "benchmark"
	@mkdir -p out
	@for sweep in $(SWEEPS); do \
	  $(INSIDE) python -m benchmarks bench @benchmarks/sweeps/$$sweep.args --json out/$$sweep.jsonl --plot out/$$sweep.svg; \
	  $(INSIDE) python -m benchmarks.page out/$$sweep.jsonl --page out/$$sweep.md > /dev/null; \
	done

check: lint sanitizers

peers: $(STAMPS)/tools
	$(SAY) "MPI peers"
	@PYTHON=$(BIN)/python bash benchmarks/make_peers.sh

lint: $(STAMPS)/lint
	$(SAY) "lint"
	@$(BIN)/ruff check $(PYTHON_FILES)
	@$(BIN)/ruff format --check $(PYTHON_FILES)
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	@$(BIN)/mypy
	@$(BIN)/mypy --strict tests/support/typed_program.py

format: $(STAMPS)/lint
	$(SAY) "format"
	@$(BIN)/ruff check -q --fix $(PYTHON_FILES) || true
	@$(BIN)/ruff format $(PYTHON_FILES)
	@$(BIN)/clang-format -i $(CPP_FILES)

# torch and its libraries come with torch, and so does the C++ runtime's place in the process: a second libstdc++ within
# the wheel would not share exceptions with torch (docs/decisions/0069).
wheel: $(STAMPS)/wheel $(STAMPS)/tools $(STAMPS)/nvcc
	$(SAY) "wheel"
	@$(INSIDE); for version in $(TORCHES); do python csrc/bindings/fetch_torch.py $$version build/torch/$$version; done
	@rm -rf build/wheel build/lib.* build/bdist.* && mkdir -p $(DIST)
	@$(INSIDE) CUDACXX="$$(cat $(STAMPS)/nvcc)" RINGLET_TORCHES="$$(printf '%s:' $(TORCHES:%=$(CURDIR)/build/torch/%))" \
	  $(PIP) wheel -q --no-build-isolation --no-deps -w build/wheel .
	@$(INSIDE) auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' -w $(DIST) build/wheel/*.whl

sdist: $(STAMPS)/tools
	$(SAY) "sources"
	@mkdir -p $(DIST)
	@$(INSIDE) python -c 'from setuptools.build_meta import build_sdist; build_sdist("$(abspath $(DIST))")' > build/sdist.log

# Any warning is an error: a link that leads nowhere, a docstring that names a parameter which is not there.
site: install $(STAMPS)/lint $(STAMPS)/site  # ruff sets the signatures
	$(SAY) "site"
	@$(BIN)/python docs/site/build.py out/site

docs-pictures: install
	$(SAY) "pictures and tables"
	@$(INSIDE) python docs/generate.py

clean:
	rm -rf build dist out .venv .venv-peers .venv-torch-* .pytest_cache .ruff_cache .mypy_cache python/*.egg-info python/ringlet/*.so
	find csrc python tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# --- the environment

$(STAMPS)/torch:
	$(SAY) "environment: $(VENV)"
	@$(PYTHON) -c '$(FITTING_PYTHON)' || { echo "ringlet needs Python >= 3.10; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true). Name another: PYTHON=python3.12 make" >&2; exit 1; }
	@if $(PYTHON) -c '$(FITTING_TORCH)' 2>/dev/null; then \
	  echo "using the torch that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	  outer=$$($(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)'); \
	  $(BIN)/python -c '$(FITTING_TORCH)' 2>/dev/null || \
	    echo "$$outer" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-outer-environment.pth"; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	  $(PIP) install torch==$(TORCH); \
	fi
	@$(BIN)/python -c '$(FITTING_TORCH); print("torch", torch.__version__)'
	@mkdir -p $(STAMPS) && touch $@

# What is started as a program is installed here, also where the environment that torch comes from has it.
$(STAMPS)/tools: $(STAMPS)/torch pyproject.toml
	$(SAY) "build and test tools"
	@$(PIP) install -q --ignore-installed ninja
	@$(PIP) install -q numpy pytest pytest-xdist rich matplotlib 'setuptools>=64' wheel
	@$(INSIDE) cmake --version 2>/dev/null | awk '/version/ { split($$3, v, "."); exit !(v[1] > 3 || v[1] == 3 && v[2] >= 20) }' || $(PIP) install -q cmake
	@touch $@

# The packages of an extra of pyproject.toml, whose versions are exact.
pinned = $$($(BIN)/python -c 'import re; print(*re.findall(r"\"([a-z-]+==[^\"]+)\"", re.search(r"(?m)^$(1) = (.*)$$", open("pyproject.toml").read())[1]))')

$(STAMPS)/lint $(STAMPS)/wheel $(STAMPS)/site $(STAMPS)/coverage: $(STAMPS)/tools pyproject.toml
	$(SAY) "$(@F) tools"
	@$(PIP) install -q --ignore-installed $(call pinned,$(@F))
	@touch $@

# A wheel carries the GPU's part: this holds the path of a packaged nvcc, where the machine has none of its own.
$(STAMPS)/nvcc: $(STAMPS)/tools pyproject.toml
	@command -v nvcc > /dev/null || { \
	  printf '\n== %s\n' "nvcc" && $(PIP) install -q $(call pinned,nvcc) && cd $(VENV)/lib/python*/site-packages/nvidia/cu13 && \
	  ln -sfn lib lib64 && echo "$$PWD/bin/nvcc" > $(CURDIR)/$@; } || \
	  echo "no nvcc to be had: the wheel will have no part for GPUs"
	@touch $@

# Readers of the GPU's machine code, for where an nvcc made some; without them that test skips itself.
$(STAMPS)/machine-code: $(STAMPS)/tools
	@! command -v nvcc > /dev/null || $(PIP) install -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm || echo "no cuobjdump to be had: tests of the GPU's machine code will be skipped"
	@touch $@

$(STAMPS)/torch-%: | $(STAMPS)/torch
	$(SAY) "environment: .venv-torch-$*"
	@$(BIN)/python -m venv --clear .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip --disable-pip-version-check install -q 'torch==$*.*' numpy
	@touch $@

$(STAMPS)/conformance: $(STAMPS)/tools
	@$(PIP) install -q expecttest
	@touch $@

# An environment beside this one, which has all that is in this one, and more.
define beside
	$(SAY) "environment: .venv-$(1)"
	@$(BIN)/python -m venv .venv-$(1)
	@$(BIN)/python -c 'import sys; print(*[path for path in sys.path if path], "$(CURDIR)/python", sep="\n")' \
	  > "$$(.venv-$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-environment.pth"
	@.venv-$(1)/bin/python -m pip --disable-pip-version-check install -q $(2) || \
	  { echo "cannot install $(2): is there a package index to be reached?" >&2; exit 1; }
	@touch $@
endef

$(STAMPS)/launchers: | $(STAMPS)/installed
	$(call beside,launchers,'ray[train]')

# DeepSpeed is built from source, with the torch and the compilers that are here.
$(STAMPS)/frameworks: | $(STAMPS)/installed
	$(call beside,frameworks,accelerate lightning transformers)
	@.venv-frameworks/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation deepspeed

$(STAMPS)/slurm: | $(STAMPS)/installed
	$(SAY) "Slurm and munge"
	@{ command -v slurmctld && command -v munged; } > /dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurm-wlm munge > /dev/null; } || \
	  { echo "no Slurm here: as root, apt-get install slurm-wlm munge" >&2; exit 1; }
	@touch $@

# --- builds; ninja knows what is out of date

extension: $(STAMPS)/tools
	$(SAY) "extension"
	@$(INSIDE) python setup.py -q build_ext --inplace

install: extension $(STAMPS)/installed

$(STAMPS)/installed: setup.py pyproject.toml $(STAMPS)/tools | extension
	@$(INSIDE) $(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

# In the extension's build folder: both are made of the same library.
cpp-test: install
	$(SAY) "C++ tests"
	@$(INSIDE) cmake -DRINGLET_TESTING=ON $(BUILD) > /dev/null
	@$(INSIDE) cmake --build $(BUILD)
	@$(INSIDE) ctest --test-dir $(BUILD) -j 3 --output-on-failure

# On a machine with an NVIDIA GPU; needs no network and makes no .venv.
gpu-check:
	@$(PYTHON) tests/gpu/check.py $(PARTS)

# What the Python tests have for a GPU.
emulated-device: extension
	@$(INSIDE) cmake --build $(BUILD) --target emulated_device

# For the tests of `ringlet explore`, which skip themselves without one.
browser:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) > /dev/null || echo "no chromium to be had: tests in a browser will be skipped"; \
	  else echo "no chromium: tests in a browser will be skipped; install it with your system's packages, e.g. apt-get install chromium"; fi

python-test: install emulated-device $(STAMPS)/machine-code
	$(SAY) "Python tests, two at a time"
	@failed=0; \
	$(INSIDE) $(PYTEST) --durations=10 -n 2 --dist worksteal -m '$(CHOSEN) not alone' || failed=1; \
	printf '\n== %s\n' "Python tests that run alone"; \
	$(INSIDE) $(PYTEST) --durations=10 -m '$(CHOSEN) alone' || failed=1; \
	exit $$failed

sanitizers: asan tsan

# No suppressions. The first finding ends the test.
asan tsan: $(STAMPS)/tools
	$(SAY) "C++ tests under $@"
	@$(INSIDE) cmake --preset $@ > /dev/null
	@$(INSIDE) cmake --build --preset $@
	@$(INSIDE) UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 ctest --preset $@ -j $(JOBS)
