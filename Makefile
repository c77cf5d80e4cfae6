# make quickstart   watch a small real model adapt to a user (no GPU needed)
# make test         the tests
# make lint         ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A pinned torch; on a machine without a GPU, point pip at PyTorch's CPU wheels to save gigabytes.
TORCH ?= torch==2.13.0

.PHONY: quickstart test lint format clean

$(VENV)/.installed: setup.py requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	cd examples && ../$(BIN)/python -m quickstart.run --folder ../runs --models ../models $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
