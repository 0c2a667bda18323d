# Everything here sets itself up: the first call makes .venv, later calls find it ready.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test check bench clean

setup: $(READY)

# constraints.txt pins every package, also those of the build, so that a set-up is the same everywhere.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'make: Python 3.11 or later is needed; name it with PYTHON=...' >&2; exit 1; }
	@echo 'Setting up $(VENV), once; a few minutes.' >&2
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/nmla demo

# A file's tests stay together: they share what is slow to make.
test: setup
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup
	@for name in losses data training distill; do $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
