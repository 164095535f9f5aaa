# One virtual environment, pinned by constraints.txt. Stamps in it remember what is installed,
# so that a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test install lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/installed ## set up, then train HASSLE on the embedded images (about two minutes)
	$(BIN)/fedhassle run

test: .venv/installed-test ## set up with the test tools, then tests, lint, format and type check
	$(BIN)/python -m pytest -n auto --dist loadgroup
	@$(MAKE) --no-print-directory lint

lint: .venv/installed-test ## lint, format and type check alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed-test ## set up everything, extras included, and run nothing

clean: ## remove the environment and the caches (runs/ stays)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: a range resolved together with the rest may pull another build of it.
.venv/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedhassle needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@echo "setting up .venv (the first time takes a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) torch
	@touch $@

.venv/installed: .venv/torch pyproject.toml
	@$(PIP) --editable .
	@touch $@

.venv/installed-test: .venv/installed
	@$(PIP) --editable '.[test]'
	@touch $@
