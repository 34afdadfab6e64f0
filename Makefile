# Everything a fresh machine with Python 3.11, g++ and make needs:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_DISABLE_IMPORT_WARNING ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: demo test lint bench soak format clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) $(CLIENTS)
	$(BIN)/python -m pytest -m "not soak"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Each benchmark prints what it compares; see README, "How fast".
bench: $(STAMP)
	$(BIN)/python benchmarks/scheduler_overhead.py
	$(BIN)/python benchmarks/throughput.py

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -s --timeout 7200

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[dev]'
	touch $(STAMP)

# Other people's clients (lm-eval, instructor), which tests try against the server.
$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[clients]'
	touch $(CLIENTS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
