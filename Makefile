# Everything a working copy needs: `make run` and `make test` set up .venv by themselves.

# fedml 0.9.6 installs on Python 3.10 and 3.11 only (setup.cfg says why): take the first of these that fits.
PYTHON ?= $(shell for python in python3 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' 2>/dev/null \
	&& { echo $$python; break; }; done)
VENV ?= .venv
# Where none fits, uv brings this one; uv itself and what it says go into a folder of their own.
BROUGHT := 3.11
UV_FOLDER := $(VENV)-uv
# Flower needs another protobuf than fedml: an environment of its own, on the first of these Pythons that fits.
FLOWER_VENV ?= .venv-flower
FLOWER_PYTHON ?= $(shell for python in python3 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23].*/bin/python3); do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null \
	&& { echo $$python; break; }; done)
RECIPE ?= recipes/calfat_digits.yaml
DATA ?= ~/data
# Further arguments of `calfat run`, as in: make run ARGS="--seed 1 --set train_args.comm_round=5"
ARGS ?=
# Seed of the noise on the weights of stored models
NOISE ?= 0
# More than the cores: tests also wait, for processes, time-outs and disks.
WORKERS ?= 3

BIN = $(VENV)/bin
FLOWER_TESTS := hypothesis psutil pytest pytest-timeout pytest-xdist trustme
SETUP_FILES := setup.cfg pyproject.toml constraints.txt
# A file's tests share what is expensive to start, so one worker runs them all. The order stays: files with many tests
# are not the long ones. Where no bytecode may be written, hundreds of processes would each compile the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST_FLOWER = PYTHONDONTWRITEBYTECODE= $(FLOWER_VENV)/bin/python -m pytest
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help run run-flower test-flower slow-flower cifar10 quick noise test test-repository slow lint docs clean

help:
	@echo "make run     set up $(VENV) if needed, then run $(RECIPE) (RECIPE=... ARGS=... for another)"
	@echo "make run-flower   set up $(FLOWER_VENV) if needed, then run $(RECIPE) on Flower instead of FedML"
	@echo "make test-flower  the tests of Flower (make slow-flower: those marked slow)"
	@echo "make cifar10 download CIFAR-10 to ~/data and check its sums (DATA=... for another folder)"
	@echo "make quick   the tests of the maths, of recipes and of the inputs: under a minute"
	@echo "make noise   the tests that attack stored models, with noise on their weights (NOISE=1 for another seed)"
	@echo "make test    the tests of the package, without those marked slow"
	@echo "make test-repository  the tests of the studies, the documentation and the packaging, without those marked slow"
	@echo "make slow    the tests marked slow"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation site, in site/"
	@echo "make clean   remove $(VENV), $(FLOWER_VENV), site/ and the tools' caches; runs/ stays"

run: $(VENV)/.installed
	$(BIN)/calfat run $(RECIPE) $(ARGS)

run-flower: $(FLOWER_VENV)/.installed
	$(FLOWER_VENV)/bin/calfat run $(RECIPE) --host flower $(ARGS)

test-flower: $(FLOWER_VENV)/.installed
	$(PYTEST_FLOWER) -m "not slow" tests/flower

# Parity runs on FedML as well, in its own environment.
slow-flower: $(VENV)/.installed $(FLOWER_VENV)/.installed
	$(PYTEST_FLOWER) -m slow tests/flower

cifar10: $(VENV)/.installed
	$(BIN)/calfat download cifar10 --to $(DATA)

quick: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" tests/maths tests/recipe tests/inputs

noise: $(VENV)/.installed-dev
	$(PYTEST) -m "stored and not slow" --weight-noise $(NOISE) tests/evaluators

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not repository" --weight-noise $(NOISE)

test-repository: $(VENV)/.installed-dev
	$(PYTEST) -m "repository and not slow"

slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Material for MkDocs warns of a coming MkDocs 2, which is not what is installed.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) $(FLOWER_VENV) $(UV_FOLDER) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

# The two stamps are younger than the set-up files exactly when the environment holds what those ask for,
# so the second `make run` starts at once and a changed pin is installed by the next one.
$(VENV)/.installed: $(SETUP_FILES) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(SETUP_FILES) | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

# By uv, which links gigabytes of CUDA libraries where pip would copy them. Unlike pip it compiles only when told to.
$(FLOWER_VENV)/.installed: VENV := $(FLOWER_VENV)
$(FLOWER_VENV)/.installed: BROUGHT := 3.12
$(FLOWER_VENV)/.installed: $(SETUP_FILES)
ifneq ($(FLOWER_PYTHON),)
	$(FLOWER_PYTHON) -m venv $(VENV)
else
	@echo "No Python 3.12 or 3.13 found (Flower runs beside no fedml): uv brings $(BROUGHT) into $(VENV)"
	@$(BRING_UV) || $(call cannot,uv could not be installed)
	@$(BRING_PYTHON) || $(call cannot,uv could not fetch it)
endif
	$(PIP_INSTALL) uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[flower]' $(FLOWER_TESTS)
	@touch $@

# The pip that comes with Python may be years old: the pinned one is a quarter faster at this set-up.
$(BIN)/python:
ifneq ($(PYTHON),)
	$(PYTHON) -m venv $(VENV)
else
	@echo "No Python 3.10 or 3.11 found (fedml 0.9.6 installs on no other): uv brings $(BROUGHT) into $(VENV)"
	@$(BRING_UV) || $(call cannot,uv could not be installed)
	@$(BRING_PYTHON) || $(call cannot,uv could not fetch it)
endif
	$(PIP_INSTALL) --upgrade pip

# A Python without ensurepip (Debian's, without python3-venv) may still have pip.
BRING_UV = mkdir -p $(UV_FOLDER) && { command -v uv || { python3 -m venv $(UV_FOLDER) && \
	$(UV_FOLDER)/bin/python -m pip install uv; } || python3 -m pip install --target $(UV_FOLDER) uv; } >$(UV_LOG) 2>&1
BRING_PYTHON = PATH="$$PATH:$(UV_FOLDER)/bin" \
	uv venv --allow-existing --seed --python $(BROUGHT) $(VENV) >$(UV_LOG) 2>&1
UV_LOG = $(UV_FOLDER)/log.txt
cannot = { echo "There is no Python $(BROUGHT): $(1) ($(UV_LOG) says why)." \
	"Install Python 3.10 or 3.11, then name it: make run PYTHON=/path/to/python3.11" >&2; exit 2; }
