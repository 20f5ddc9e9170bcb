# `make demo` and `make test` need Python 3.11 or newer and make; they set up the rest, once, in this folder.
#
#   make test PYTHON=python3.12        another interpreter
#   make demo ARGS="--steps 5"     flags for the demo's `seqtile train`
#   make setup TORCH="torch==2.13.0 --index-url URL"    another build of torch (pip arguments)

PYTHON ?= python3
VENV ?= .venv
VENV_LOWEST ?= .venv-lowest
VENV_NEWEST ?= .venv-newest
NEWEST_EXTRAS = train,test,interop
VENV_AXOLOTL ?= .venv-axolotl
VENV_MS_SWIFT ?= .venv-ms-swift
TORCH ?= -r constraints/torch.txt
ARGS ?=
# Seconds of processor time: `make test-fast` leaves out the test functions that took longer (tests/times.txt).
QUICK ?= 0.4
PYTEST_ARGS ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 2))')

# Tests of one process run side by side, a file in one worker; what starts several processes or takes many gigabytes has
# the machine to itself. A worker that is killed (memory) ends the run: another in its place would meet the same.
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# $(1) the environment, $(2) pytest's arguments. What did not pass beside all the others (or did not run, after a killed
# worker) runs once more without them: it has to pass then, and both runs are printed.
PASSED = .passed-$(notdir $(1)).txt
define run_tests
rm -f $(PASSED)
$(1)/bin/python -m pytest $(2) --write-passed=$(PASSED) || { \
    echo "What did not pass runs once more, without the tests that did." && \
    $(1)/bin/python -m pytest $(2) -v --without-passed=$(PASSED); }
endef

# Without the slow tests.
ONE_PROCESS = "not slow and not distributed and not alone and not frameworks"

# The tests that also run with the lowest supported transformers: everything that needs no `train` extra.
CORE = tests/unit tests/compat tests/numerics -m "not slow and not gpu" --ignore-glob="*/test_train*" --ignore-glob="*/test_cli*" --ignore-glob="*/test_gpu_estimates*"

export TORCH
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test-gpu gpu gpu-ladder bench-cpu hub-kernel try-wheel test test-all test-fast times test-highest test-lowest test-newest test-peers test-frameworks coverage docs lint wheel clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%.-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## the virtual environment (.venv) with the highest supported versions

demo: $(VENV)/.ready  ## train a small model on real text, tiled and untiled, and print what it cost
	$(VENV)/bin/seqtile train $(ARGS)

test-gpu: $(VENV)/.ready  ## the tests marked `device` on one GPU, in under four minutes; ARGS="--device cpu" runs them here
	$(VENV)/bin/python tests/on_device.py $(ARGS)

gpu: $(VENV)/.ready  ## the GPU suite, ten minutes on one device: writes rows into benchmarks/results
	$(VENV)/bin/python benchmarks/gpu.py $(ARGS)

gpu-ladder: $(VENV)/.ready  ## the longest sequence of every rung on one device, ten minutes a rung: start it again to go on
	$(VENV)/bin/python benchmarks/gpu_ladder.py $(ARGS)

bench-cpu: $(VENV)/.ready  ## the CPU claims, half an hour; ARGS="--part steps": whole steps beside Transformers and ALST
	$(VENV)/bin/python benchmarks/cpu.py $(ARGS)

test: $(VENV)/.ready $(VENV_LOWEST)/.ready  ## all but the slow tests, 18 minutes on two cores; the quick core tests with the lowest versions too
	$(call run_tests,$(VENV),$(SIDE_BY_SIDE) -m $(ONE_PROCESS) $(PYTEST_ARGS))
	$(call run_tests,$(VENV),-m "(distributed or alone) and not slow" $(PYTEST_ARGS))
	$(call run_tests,$(VENV_LOWEST),$(SIDE_BY_SIDE) $(CORE) --quick=$(QUICK) $(PYTEST_ARGS))

test-all: test-highest test-lowest  ## every test, then the core tests with the lowest supported versions: what CI runs

test-highest: $(VENV)/.ready  ## every test, with the highest supported versions
	$(call run_tests,$(VENV),$(SIDE_BY_SIDE) -m "not distributed and not alone and not frameworks" $(PYTEST_ARGS))
	$(call run_tests,$(VENV),-m "distributed or alone" $(PYTEST_ARGS))

test-lowest: $(VENV_LOWEST)/.ready  ## the core tests, with the lowest supported versions
	$(call run_tests,$(VENV_LOWEST),$(SIDE_BY_SIDE) $(CORE) $(PYTEST_ARGS))

# TORCH="--upgrade torch" takes the newest torch too: the build for accelerators, several GB, where no other is offered.
test-newest: $(VENV_NEWEST)/.ready  ## what rests on other libraries, with the newest of them; ARGS="--write docs/integrations.md"
	$(VENV_NEWEST)/bin/python tests/newest.py --jobs $(JOBS) $(ARGS)

test-peers: $(VENV)/.ready  ## Transformers' common model tests on models that seqtile has changed; ARGS="--write docs/integrations.md"
	$(VENV)/bin/python tests/peers.py $(ARGS)

# The frameworks pin other versions than ours, so that each has an environment of its own (about 4 and 2 GB).
test-frameworks: $(VENV)/.ready $(VENV_AXOLOTL)/.ready $(VENV_MS_SWIFT)/.ready  ## real axolotl and ms-swift runs with the plugins
	SEQTILE_AXOLOTL=$(abspath $(VENV_AXOLOTL)) SEQTILE_MS_SWIFT=$(abspath $(VENV_MS_SWIFT)) \
	    $(VENV)/bin/python -m pytest -m frameworks tests/frameworks $(PYTEST_ARGS)

coverage: $(VENV)/.ready  ## all but the slow tests of one process, and the lines and branches of src that none of them runs
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m $(ONE_PROCESS) --cov --cov-report=term-missing $(PYTEST_ARGS)

docs: $(VENV)/.ready  ## the documentation's site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict  # with --quiet, strict counts no warnings

test-fast: $(VENV)/.ready  ## the quick tests, in under two minutes on two cores; QUICK=1 takes longer ones too
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m $(ONE_PROCESS) --quick=$(QUICK) $(PYTEST_ARGS)

# Twice: what several functions share counts for the first of them that runs.
times: $(VENV)/.ready  ## measure the test functions and write tests/times.txt, by which test-fast leaves out long ones
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m $(ONE_PROCESS) --write-times $(PYTEST_ARGS)
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m $(ONE_PROCESS) --quick=$(QUICK) --write-times $(PYTEST_ARGS)

lint: $(VENV)/.ready  ## ruff (rules and format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check src tests benchmarks examples hub_kernel $(wildcard docs/*.py docs/*/*.py)
	$(VENV)/bin/mypy

# Another Python has an environment of its own: make test-python-3.12, test-python-3.13 (or any other that is installed).
test-python-%:  ## the quick tests with another Python, as in make test-python-3.12
	$(MAKE) test-fast VENV=.venv-python-$* PYTHON=$(if $(filter python3,$(PYTHON)),python$*,$(PYTHON))

hub-kernel: $(VENV)/.ready  ## dist/hub_kernel, the fused MLP as the Hub's `kernels` package loads it
	$(VENV)/bin/python hub_kernel/make.py dist/hub_kernel

wheel: $(VENV)/.ready  ## dist/seqtile-*.whl
	rm -f dist/seqtile-*.whl
	$(VENV)/bin/python -m build --wheel

try-wheel: $(VENV)/.ready  ## build the wheel, install it into an empty environment and run the README's lines there
	$(VENV)/bin/python -m pytest tests/integration/test_wheel.py $(PYTEST_ARGS)

clean:  ## remove what was built, and caches
	rm -rf build dist site .passed-*.txt .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the virtual environments too
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_NEWEST) $(VENV_AXOLOTL) $(VENV_MS_SWIFT)

# A stamp is newer than what it was made from, or the environment is made again on top of the old one.
$(VENV)/.ready: pyproject.toml constraints/torch.txt constraints/highest.txt
	$(call make_environment,$(VENV),constraints/highest.txt,dev$$($(CAN_COMPILE) && echo ,deepspeed))

$(VENV_LOWEST)/.ready: pyproject.toml constraints/torch.txt constraints/lowest.txt
	$(call make_environment,$(VENV_LOWEST),constraints/lowest.txt,test)

# Made anew each time: what was the newest when it was made is not now.
.PHONY: $(VENV_NEWEST)/.ready
$(VENV_NEWEST)/.ready:
	@rm -rf $(VENV_NEWEST)
	$(call make_environment,$(VENV_NEWEST),/dev/null,$(NEWEST_EXTRAS)$$($(CAN_COMPILE) && echo ,deepspeed))

$(VENV_AXOLOTL)/.ready: pyproject.toml constraints/torch.txt constraints/axolotl.txt
	$(call make_framework,$(VENV_AXOLOTL),constraints/axolotl.txt)

$(VENV_MS_SWIFT)/.ready: pyproject.toml constraints/torch.txt constraints/ms-swift.txt
	$(call make_framework,$(VENV_MS_SWIFT),constraints/ms-swift.txt)

# DeepSpeed compiles C++ on first use. Without a compiler and Python's headers it is left out, and its tests are skipped
# with that reason.
CAN_COMPILE = command -v c++ >/dev/null && $(PYTHON) -c 'import pathlib, sys, sysconfig; \
    sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'

# $(1) the environment, $(2) its pinned versions, $(3) the extra to install.
define make_environment
@command -v $(PYTHON) >/dev/null || { \
    echo "seqtile needs Python 3.11 or newer, $(PYTHON) was not found: install it, or say make PYTHON=/path/to/python" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seqtile needs Python 3.11 or newer, \
$(PYTHON) is %d.%d: install one, then say make PYTHON=python3.12" % sys.version_info[:2])'
@echo "Setting up $(1): this happens once and takes a few minutes."
@$(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet $(TORCH)
@$(1)/bin/python -m pip install --quiet --constraint $(2) --editable ".[$(3)]"
@touch $@
endef

# $(1) the environment, $(2) the framework's version. DeepSpeed's set-up reads the torch that is installed already.
define make_framework
@echo "Setting up $(1): this happens once and takes a few minutes."
@$(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet $(TORCH) setuptools wheel ninja
@$(1)/bin/python -m pip install --quiet --no-build-isolation --requirement $(2)
@$(1)/bin/python -m pip install --quiet --editable .
@touch $@
endef
