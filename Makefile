# make test     the tests, in a virtual environment that is made on first use
# make lint     ruff and mypy
# make bench    plans and peers run on emulated clusters, predicted against measured (root, hours; BENCH_ARGS=--quick)
# make demo     plan.json, report.md and report.html from a real run on this machine
# make venv     only the environment; PYTHON=python3.12 picks another interpreter

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: venv test lint bench demo clean

venv: $(VENV)/.stamp

# torch first and alone: the build found then is the one that stays.
$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[models,zoo,test]'
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Two workers; tests that start processes of their own take turns (tests/conftest.py).
test: $(VENV)/.stamp
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# DeepSpeed is one of the peers. Where it cannot be had the comparison goes on, and its row says so.
bench: $(VENV)/.stamp
	-DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[deepspeed]'
	$(BIN)/python -m benchmarks.compare_plans $(BENCH_ARGS)

demo: $(VENV)/.stamp
	$(BIN)/python -m benchmarks.demo

clean:
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache
