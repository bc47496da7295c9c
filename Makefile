# make demo | make test | make lint: each makes its virtual environment first where it is missing.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, such as an index with torch for another accelerator.
PIP_ARGS ?=
# What `make demo` runs, and what `make test` adds to pytest's command line.
DEMO ?= -m recipes.train experiment=demo && \
	$(IN_VENV) -m recipes.evaluate ckpt_path=logs/demo/checkpoints/best.ckpt \
	require.max_difference=1e-4 require.min_below_entropy=0.3
TEST_ARGS ?=
# Tests of one file stay together: they share processes that were started once.
WORKERS ?= 2

IN_VENV := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# One thread a process: tests and demo run several processes on a few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test conformance lint format
help:
	@echo "make demo    trains GPT-2 as a pipeline of 2 processes on this machine's CPU"
	@echo "make test    runs the tests"
	@echo "make conformance  tries everything that users do on six layouts, and writes docs/conformance.md"
	@echo "make lint    checks style and types"
	@echo "make format  puts the sources into their format"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch
	$(IN_VENV) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[recipes,dev]"
	touch $@

demo: $(INSTALLED)
	$(IN_VENV) $(DEMO)

test: $(INSTALLED)
	$(IN_VENV) -m pytest -n $(WORKERS) --dist loadfile $(TEST_ARGS)

conformance: $(INSTALLED)
	rm -f docs/conformance.md
	$(IN_VENV) -m pytest -n $(WORKERS) --dist loadfile tests/conformance --layouts all \
		--conformance-report docs/conformance.md $(TEST_ARGS)

lint: $(INSTALLED)
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

format: $(INSTALLED)
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .
