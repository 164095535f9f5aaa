# One virtual environment, pinned by constraints.txt. Stamp files in it record what is installed, so that a
# second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-faults install lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/installed ## install, then train HASSLE on the included images (about a minute of training)
	$(BIN)/fedhassle run

test: .venv/installed-test ## install the test tools, then run the tests and `make lint`
	$(BIN)/python -m pytest -n auto --dist loadgroup
	@$(MAKE) --no-print-directory lint

test-faults: .venv/installed-test ## let every file operation of small runs fail in turn (about an hour)
	$(BIN)/python -m pytest -m faults tests/runs/test_faults.py

lint: .venv/installed-test ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed-test ## install everything, including the extras

clean: ## remove the environment and the caches, but not runs/
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: resolving it together with the rest may select another build.
.venv/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedhassle needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@echo "creating .venv (this takes a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(PIP) torch
	@touch $@

.venv/installed: .venv/torch pyproject.toml
	@$(PIP) --editable .
	@touch $@

.venv/installed-test: .venv/installed
	@$(PIP) --editable '.[test]'
	@touch $@
