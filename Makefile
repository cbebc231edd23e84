# Every target sets up what it needs: python3 with pip is enough to begin with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
TASK ?= calc

.PHONY: install demo test test-all lint nano clean

install: $(VENV)/.installed

# torch first and pinned: other builds bring gigabytes of CUDA to machines without a GPU.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("strop needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dev]"
	@touch $@

demo: install
	$(BIN)/strop demo --seed $(SEED) --task $(TASK)

test: install
	$(BIN)/python -m pytest -m "not slow and not fault and not gpu"

test-all: install lint
	$(BIN)/python -m pytest -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Train the model in the box anew (about five minutes on two cores).
nano: install
	$(BIN)/python recipes/nano/train.py

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
