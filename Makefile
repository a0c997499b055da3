# Everything that a fresh machine needs. `make demo` and `make test` create the environment themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test soak bench lint clean

demo: $(READY)
	$(BIN)/lmstate demo

test: $(READY)
	$(BIN)/python -m pytest -n 2

soak: $(READY)
	$(BIN)/python -m pytest -m soak -n 2

bench: $(READY)
	$(BIN)/python -m bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The editable install compiles the native operations; without a compiler everything runs on the references.
$(READY): pyproject.toml setup.py $(wildcard src/lmstate/ops/cpu/*.c src/lmstate/ops/cpu/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch>=2.10,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/lmstate/ops/cpu/*.so
