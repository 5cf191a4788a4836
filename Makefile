# Everything that is done often with this repository; `make` alone says what there is.
#
# Needs make and Python 3.11 or newer with pip; all else goes into a virtual environment in .venv. An installation is
# redone when pyproject.toml has changed, and only then.
#
# To be told: PYTHON=python3.12 (which Python makes the environment), PYTEST_ARGS="tests/unit -x", DEMO_ARGS, BENCH_ARGS.
# Most tests wait for processes most of the time: several files run side by side, and then the few that must be alone.
# Tests of what holds over each transport run once over each, and each transport counts as a file.

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?=
PYTHONS ?= 3.11 3.12 3.13
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test pythons check e2e bench proto clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## install, then draw a picture with CPU-bound jobs on all cores
	@exec $(RUN) -m spooled_supervisor demo $(DEMO_ARGS)

test: $(VENV)/.installed-test ## install, then run all tests (PYTEST_ARGS: only these, one after the other)
	@if [ -n "$(PYTEST_ARGS)" ]; then exec $(RUN) -m pytest $(PYTEST_ARGS); fi
	$(RUN) -m pytest --numprocesses=3 --dist=loadgroup -m "not alone" --durations=15
	exec $(RUN) -m pytest -m alone

pythons: $(VENV)/bin/python ## all tests on every other Python of PYTHONS that is here, in .venv-3.12 and so on
	@missing=
	own=$$($(RUN) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	for version in $(PYTHONS); do
		if [ "$$version" = "$$own" ]; then continue; fi
		python=python$$version
		if ! "$$python" -c '' 2>/dev/null; then # missing, or a shim of pyenv(1) that is not active
			installed=$$(pyenv whence "$$python" 2>/dev/null | tail -n 1)
			python=$$(PYENV_VERSION=$$installed pyenv which "$$python" 2>/dev/null) || python=
		fi
		if [ -z "$$python" ]; then missing="$$missing $$version"; continue; fi
		$(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON="$$python"
	done
	if [ -n "$$missing" ]; then echo "NOT TESTED, not on this machine: Python$$missing" >&2; fi

check: $(VENV)/.installed-test ## format, lint, types
	@$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

e2e: $(VENV)/.installed-test ## only the tests with real processes; E2E_TRANSPORT=grpc-stream: all, over that transport
	@exec $(RUN) -m pytest tests/e2e $(PYTEST_ARGS)

bench: $(VENV)/.installed-test ## measure: jobs per second, cost per job, latencies
	@exec $(RUN) -m tests.bench $(BENCH_ARGS)

proto: $(VENV)/.installed-test ## write the gRPC code anew from spooled.proto
	@exec $(RUN) -m spooled_supervisor.proto.generate

clean: ## remove the environment, caches and what was built
	@rm -rf $(VENV) .venv-* build dist bench-results mandelbrot.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment --------------------------------------------------------------------------------------------------

# Marks stand inside the environment, so that both go together. The tests need all that the demo does.
$(VENV)/.installed-demo: pyproject.toml $(VENV)/bin/python
	@echo "installing into $(VENV) ..."
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev-server]'
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/bin/python
	@echo "installing into $(VENV), with what the tests need ..."
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.installed-demo

# Debian's Python may be externally managed, and lack ensurepip (it comes with python3-venv): then its own pip, which
# --python (pip 22.3) points at the new environment, puts another pip there.
$(VENV)/bin/python:
	@found=
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
			found=$$python
			break
		fi
	done
	if [ -z "$$found" ]; then
		echo "no Python 3.11 or newer among: $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)" >&2
		echo "install one, or name it: make PYTHON=/path/to/python3" >&2
		exit 1
	fi
	echo "making $(VENV) with $$("$$found" --version) ..."
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null || ! "$$found" -m venv --clear $(VENV) >/dev/null 2>&1; then
		if ! "$$found" -m venv --clear --without-pip $(VENV) ||
			! "$$found" -m pip --python $(VENV)/bin/python install --quiet --disable-pip-version-check pip; then
			rm -rf $(VENV)
			echo "cannot make a virtual environment with $$found: it needs the module ensurepip (on Debian:" >&2
			echo "apt install python3-venv), or a pip of its own, 22.3 or newer (apt install python3-pip)" >&2
			exit 1
		fi
	fi
