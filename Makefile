# Everything that a fresh machine needs. `make demo` and `make test` create the environment themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
LIBRARY = $(VENV)/.library

# Bytecode is kept even where the environment asks Python not to write it: else each worker of the tests, and each
# process that a test starts, compiles all modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-fast soak bench lint lint-workflows docs asan tsan amx wheel wheels sdist clean

demo: $(LIBRARY)
	$(BIN)/lmstate demo

test: $(READY)
	$(BIN)/python -m pytest -n 2

# The part to run after each change; CONTRIBUTING.md says what is in the other folders.
FAST ?= tests/docs/test_imports.py tests/docs/test_docstrings.py tests/generation tests/state tests/speculation
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 -x $(FAST)

soak: $(READY)
	$(BIN)/python -m pytest -m soak -n 2

bench: $(READY)
	$(BIN)/python -m bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site: the pages of docs/ and the API reference, from the docstrings.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The workflows of the forge, against their schema.
lint-workflows: $(READY)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# The native operations under AddressSanitizer and UndefinedBehaviorSanitizer, built apart from the checkout: any report
# ends the run. Leaks are not looked for (Python and torch keep memory to their end), nor the fast variants left out.
# Reports go to the terminal: what pytest captures would be lost with the process that they end.
ASAN = build/asan
asan: $(READY)
	$(call apart,$(ASAN))
	cd $(ASAN) && LMSTATE_CFLAGS="$(LIGHT) -fsanitize=address,undefined -fno-sanitize-recover=all" $(BUILD)
	cd $(ASAN) && PYTHONPATH=src LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1 $(PYTEST) $(ASAN_TESTS)

# Not the longest of storages, which take minutes more, nor their measures of quality, which run nothing that others do not.
ASAN_TESTS ?= tests/ops tests/kv tests/state/test_blocks.py tests/invariants/test_to_the_bit.py \
  --ignore=tests/kv/test_quality.py -k "not perplexity and not long_stream"

# Threads under ThreadSanitizer. It does not see libgomp, so parallel regions run on the threads of tests/threads/gomp.c;
# torch and Python are not built with it, and what they read and write is left out.
TSAN = build/tsan
tsan: $(READY)
	$(call apart,$(TSAN))
	$(CC) -std=gnu11 $(LIGHT) -fPIC -fsanitize=thread -c tests/threads/gomp.c -o $(TSAN)/gomp.o
	cd $(TSAN) && LMSTATE_CFLAGS="$(LIGHT) -fsanitize=thread -Wl,-Bsymbolic -Wl,$(abspath $(TSAN))/gomp.o" $(BUILD)
	! nm -D $(TSAN)/$(NATIVE) | grep "U GOMP_"  # else a part of libgomp meets what is not its own
	cd $(TSAN) && PYTHONPATH=src LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 setarch -R $(PYTEST) $(TSAN_TESTS)

TSAN_TESTS ?= tests/threads/test_races.py tests/ops -k "races or threads"

# The tiles of AMX on a processor without them, and AVX-512 on one that has AVX2 alone: instructions are computed by
# others, to the bit.
AMX = build/amx
HAS_AVX512 := $(shell grep -qs avx512_vnni /proc/cpuinfo && echo yes)
ifneq ($(HAS_AVX512),yes)
OTHERS = $(LIGHT) -mno-avx512f -Wno-psabi -include $(abspath tests/ops/avx512.h)
endif
amx: $(READY)
	$(call apart,$(AMX))
ifneq ($(HAS_AVX512),yes)
	find $(AMX)/src -name "*.[ch]" | xargs sed -i '/#pragma GCC target/d; s/"+v"/"+m"/'
endif
	cd $(AMX) && LMSTATE_VARIANTS=all LMSTATE_CFLAGS="-w $(OTHERS) -include $(abspath tests/ops/amx.h)" $(BUILD)
	ls $(AMX)/$(subst *,avx512,$(NATIVE))
	cd $(AMX) && PYTHONPATH=src $(PYTEST) $(AMX_TESTS)

AMX_TESTS ?= tests/ops tests/kv tests/state/test_blocks.py tests/invariants/test_to_the_bit.py -k "not perplexity"

LIGHT = -O1 -g1 -fno-var-tracking
NATIVE = src/lmstate/ops/cpu/native_*.so
BUILD = $(abspath $(BIN))/python setup.py -q build_ext --inplace --force && ls $(NATIVE)
PYTEST = $(abspath $(BIN))/python -m pytest -q -x -s -p no:cacheprovider
apart = rm -rf $(1) && mkdir -p $(1) && cp -r src tests docs examples bench setup.py pyproject.toml README.md LICENSE $(1) \
  && rm -f $(1)/$(NATIVE)

# A wheel with the libraries of all variants, which installs without a compiler, and the source archive. On Linux
# auditwheel names the oldest glibc that the wheel runs with. OpenMP stays out: torch brings its own, and two would compete.
wheel: $(READY)
	rm -rf build/wheel
	LMSTATE_VARIANTS=all $(BIN)/python -m build --outdir build/wheel
	mkdir -p dist
ifeq ($(shell uname),Linux)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
else
	mv build/wheel/* dist
endif

sdist: $(READY)
	$(BIN)/python -m build --sdist

# Wheels of every Linux and macOS platform: needs Docker on Linux.
wheels: $(READY)
	$(BIN)/python -m pip install --quiet "cibuildwheel>=3,<4"
	$(BIN)/python -m cibuildwheel --output-dir dist

# The library alone, for `make demo`. The editable install compiles the native operations; without a compiler everything
# runs on the references.
$(LIBRARY): pyproject.toml setup.py $(wildcard src/lmstate/ops/cpu/csrc/*/*.[ch] src/lmstate/ops/cpu/csrc/*.c)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch ..."
	$(BIN)/python -m pip install --quiet "torch>=2.10,<2.14"
	@echo "Installing lmstate and compiling its native operations ..."
	$(BIN)/python -m pip install --quiet --editable .
	touch $(LIBRARY)

# What tests, linters and documents need besides.
$(READY): $(LIBRARY)
	@echo "Installing the development tools ..."
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/lmstate/ops/cpu/*.so
