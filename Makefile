VENV ?= .venv
BIN := $(VENV)/bin
export VENV

.PHONY: help demo test check soak bench install install-dev format sync lock audit clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install:
	@scripts/setup.sh user

install-dev:
	@scripts/setup.sh dev

demo: install ## Boot a sandbox, do real work in it, show the result
	@$(BIN)/skerry demo

test: install-dev check ## Everything CI runs: style, types, generated code, tests
	$(BIN)/python scripts/run_tests.py

check: install-dev ## Style, types and freshness of generated code only
	$(BIN)/ruff format --check src tests scripts examples
	$(BIN)/ruff check src tests scripts examples
	$(BIN)/mypy
	cd src/skerry/runtime/interpreter/inside/python && \
	$(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --explicit-package-bases .
	cd src/skerry/agents/inside && \
	$(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --explicit-package-bases .
	$(BIN)/python scripts/generate_sync.py --check
	$(BIN)/python scripts/lock.py --check

soak: install-dev ## The long runs: random kills and layers at full count, 1,000 cycles, a minute of everything at once
	SKERRY_SOAK=1 $(BIN)/pytest -q tests/test_faults.py tests/test_layer_faults.py tests/control/test_layers_model.py \
		tests/server/preview/test_storm.py tests/server/test_schemathesis.py

bench: install-dev ## Each hot path with p50 and p95, beside its rivals
	$(BIN)/python -m tests.bench

format: install-dev ## Format the code
	$(BIN)/ruff format src tests scripts examples
	$(BIN)/ruff check --fix src tests scripts examples

sync: install-dev ## Generate the sync client from the async one
	$(BIN)/python scripts/generate_sync.py

lock: install-dev ## Pin what a release runs on, with digests: requirements.lock
	$(BIN)/python scripts/lock.py

audit: install-dev ## Look for known holes in requirements.lock; says so where the advisories cannot be reached
	$(BIN)/python scripts/audit.py

clean: ## Remove what `make` made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
