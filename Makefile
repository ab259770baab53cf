# TIDE: `make demo` runs the whole cycle on this machine, `make test` passes the tests. Both set everything up first.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
UV     := 0.13.9
export OMP_NUM_THREADS ?= 1
# Two test files at a time, but for the whole cycle, whose engine takes both cores. `PARALLEL=` runs one at a time.
PARALLEL ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder
# For the test of the Prefect UI: the browser that is there, else Debian's where this user may install it.
BROWSER := test -n "$$CHROME" || command -v chromium chromium-browser google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

.PHONY: help setup lock test lint bench bench-decisions drill drill-store demo demo-fast clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup: $(VENV)/.installed .tide/.prepared  ## install everything from the lock, build lakeFS, convert the target model

$(BIN)/uv:
	@echo "[setup] virtual environment with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "TIDE needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)

$(VENV)/.installed: requirements.lock pyproject.toml infra/sglang_cpu/pyproject.toml | $(BIN)/uv
	@echo "[setup] packages from requirements.lock (7 GB on disk; 1 to 5 minutes)"
	@$(BIN)/uv pip sync --python $(BIN)/python --compile-bytecode requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e . -e infra/sglang_cpu
	@touch $@

.tide/.prepared: $(VENV)/.installed infra/lakefs/go.mod infra/lakefs/go.sum
	@echo "[setup] lakeFS server (built once from its Go module; 3 to 5 minutes) and target model"
	@mkdir -p .tide
	@$(BIN)/python -m infra.lakefs.build
	@$(BIN)/python -m infra.models
	@touch $@

.tide/.prepared-test: .tide/.prepared infra/versitygw/go.mod infra/versitygw/go.sum
	@echo "[test] S3 gateway (built once from its Go module; 1 to 2 minutes)"
	@$(BIN)/python -m infra.versitygw.build
	@$(BROWSER) || echo "[test] no browser: the test of the Prefect UI will be skipped, and say so"
	@touch $@

lock: | $(BIN)/uv   ## compile requirements.lock anew from pyproject.toml
	@$(BIN)/uv pip compile pyproject.toml --all-extras --python-version 3.11 --generate-hashes --no-emit-index-url -o requirements.lock

lint: $(VENV)/.installed  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test: setup .tide/.prepared-test  ## lint, then every test on the real parts
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest tests/integration tests/contract tests/unit $(PARALLEL) --durations=20
	@$(BIN)/python -m pytest tests/e2e

demo: setup      ## the whole cycle: serve, log, harvest, train, promote, shift, adapt, measure
	@$(BIN)/tide demo

demo-fast: setup  ## the same, shortened, without ratios
	@$(BIN)/tide demo --fast

bench: setup     ## measure capture overhead, swap and store; writes tests/bench/results/*.json
	@$(BIN)/python -m tests.bench.capture
	@$(BIN)/python -m tests.bench.swap
	@$(BIN)/python -m tests.bench.store

bench-decisions: setup  ## measure the gates' error rates on per-request data of real SGLang runs; writes results/decisions.json
	@$(BIN)/python -m tests.bench.decisions

drill-store: setup  ## kill harvesters and the lakeFS server at random points: nothing lost, nothing doubled
	@$(BIN)/python -m tests.drills.store

drill: drill-store  ## and whatever a cycle consists of, at every step boundary and at random moments (4 hours or more; goes on where it was stopped)
	@TIDE_DRILL=1 $(BIN)/python -m pytest tests/integration/test_operations.py tests/integration/test_two_replicas.py -m ""
	@$(BIN)/python -m tests.drills.cycle --boundaries --home .tide/drill
	@$(BIN)/python -m tests.drills.heartbeats

clean:           ## remove everything made here except the virtual environment
	rm -rf .tide build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
