# make demo    three streamed answers from a real cluster on this machine, from a fresh clone
# make test    the whole suite
# make test-roce   KV over RoCE v2 between two emulated hosts; as root it installs what that needs
# make test-compose   the images and the cluster of deploy/compose, in real containers; as root it installs what that needs
# make test-gpu    what needs a CUDA device, with the Python that PYTHON names (torch, Triton and pytest in it)
# make check   style, types, imports
# make bench   what this machine does with it, as one table, within 5 minutes
# make bench-peers   the same beside vLLM and Dynamo, installed into environments of their own; about an hour and a half
# make clean   everything that can be made again
#
# PYTHON=python3.12 picks the interpreter of a new .venv; ARGS="--decode 2" is passed to the demo; JOBS=4 runs tests
# in as many processes.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt libs/common/distserve/__init__.py

test_gpu_path := libs/common:services/gateway:services/prefill:services/decode:services/kvstore

.PHONY: demo test test-roce test-compose test-gpu check bench bench-peers docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-all
	@$(BIN)/distserve demo $(ARGS)

# Torch gets one thread in every test process: they share the cores.
test: $(VENV)/.stamp-dev
	$(BIN)/distserve model fetch smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

# tests/roce/verbs runs in a host of the lab, by test_verbs.py.
test-roce: $(VENV)/.stamp-dev
	$(BIN)/python deploy/roce-lab/lab.py prepare
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m roce --durations 10 tests/roce --ignore tests/roce/verbs $(ARGS)

test-compose: $(VENV)/.stamp-dev
	$(BIN)/python deploy/compose/prepare.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m compose --durations 10 tests/compose $(ARGS)

# Without the environment of the others: that has a torch for CPUs.
test-gpu:
	PYTHONPATH=$(test_gpu_path):$(PYTHONPATH) $(PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.stamp-dev
	@$(BIN)/distserve model fetch smollm2
	@$(BIN)/python -m benchmarks.all $(ARGS)

bench-peers: $(VENV)/.stamp-dev
	@$(BIN)/distserve model fetch smollm2
	@$(BIN)/python -m benchmarks.all --peers $(ARGS)

# The parts of the documentation that come from the code.
docs: $(VENV)/.stamp-dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "DistServe needs Python 3.11 or later, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it first (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build backend first and without isolation, so that it too is the pinned one.
$(VENV)/.stamp-all: $(SOURCES) | $(BIN)/python
	@echo "installing the pinned dependencies (the first time takes a few minutes)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[all]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-all
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
