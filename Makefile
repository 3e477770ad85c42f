# Everything a working copy needs: `make run` and `make test` set up .venv by themselves.

# fedml 0.9.6 installs on Python 3.10 and 3.11 only (setup.cfg says why): take the first of these that fits.
PYTHON ?= $(shell for python in python3 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' 2>/dev/null \
	&& { echo $$python; break; }; done)
VENV ?= .venv
RECIPE ?= recipes/calfat_digits.yaml
# Further arguments of `fedml run`, as in: make run ARGS="--seed 1 --set train_args.comm_round=5"
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
SETUP_FILES := setup.cfg pyproject.toml constraints.txt
# A file's tests share what is expensive to start, so one worker runs them all. The order stays: files with many tests
# are not the long ones.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help run quick test slow lint clean

help:
	@echo "make run     set up $(VENV) if needed, then run $(RECIPE) (RECIPE=... ARGS=... for another)"
	@echo "make quick   the tests of the maths, of recipes and of the inputs: under a minute"
	@echo "make test    the tests, without those marked slow"
	@echo "make slow    the tests marked slow"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove $(VENV) and the tools' caches; runs/ stays"

run: $(VENV)/.installed
	$(BIN)/fedml run $(RECIPE) $(ARGS)

quick: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" tests/maths tests/recipe tests/inputs

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

# The two stamps are younger than the set-up files exactly when the environment holds what those ask for,
# so the second `make run` starts at once and a changed pin is installed by the next one.
$(VENV)/.installed: $(SETUP_FILES) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(SETUP_FILES) | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

# The pip that comes with Python may be years old: the pinned one is a quarter faster at this set-up.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or 3.11 found (fedml 0.9.6 installs on no other)." \
	"Install one, then name it: make run PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
