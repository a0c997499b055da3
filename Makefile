# Everything that a fresh machine needs. `make demo` and `make test` create the environment themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test soak bench lint docs asan wheel clean

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

# The API reference, from the docstrings: the public modules and what their names come from.
docs: $(READY)
	$(BIN)/pdoc $(API) --no-show-source --output-directory build/docs

API ?= lmstate lmstate.kv lmstate.generation lmstate.speculation lmstate.engine lmstate.integrations.transformers

# The native operations under AddressSanitizer and UndefinedBehaviorSanitizer, built apart from the checkout: any report
# ends the run. Leaks are not looked for (Python and torch keep memory to their end), nor the fast variants left out.
ASAN = build/asan
asan: $(READY)
	rm -rf $(ASAN) && mkdir -p $(ASAN) && cp -r src tests setup.py pyproject.toml README.md LICENSE $(ASAN)
	cp -r docs examples bench $(ASAN)
	cd $(ASAN) && LMSTATE_CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	  $(abspath $(BIN))/python setup.py -q build_ext --inplace --force
	cd $(ASAN) && PYTHONPATH=src LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(abspath $(BIN))/python -m pytest $(ASAN_TESTS)

ASAN_TESTS ?= -q -x -p no:cacheprovider tests/ops tests/kv tests/invariants

# A wheel with the libraries of all variants, which installs without a compiler.
wheel: $(READY)
	$(BIN)/python -m pip install --quiet build
	LMSTATE_VARIANTS=all $(BIN)/python -m build

# The editable install compiles the native operations; without a compiler everything runs on the references.
$(READY): pyproject.toml setup.py $(wildcard src/lmstate/ops/cpu/csrc/*/*.[ch] src/lmstate/ops/cpu/csrc/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch>=2.10,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/lmstate/ops/cpu/*.so
