# Everything here sets itself up: the first target you call makes .venv and installs into it.
#   make demo PYTHON=python3.12    another interpreter
#   make test ARGS="-k torch"      some of the tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: demo test lint types format help clean

help:
	@echo "make demo    train a small ViT with and without conditioning (three minutes)"
	@echo "make test    run the tests; ARGS are handed to pytest"
	@echo "make lint    check style;  make types  check types;  make format  repair style"
	@echo "make clean   remove the environment in $(VENV)"

# Written last, so that an interrupted installation is started again and not taken for done.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("attncond needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once; PyTorch is a large download)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/attncond demo $(ARGS)

# One thread per worker: two workers with two threads each would fight for two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)
