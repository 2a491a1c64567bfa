# Every target sets itself up: the first one to run makes .venv and installs the package into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard moe_graph/emulator/cann/*)
# An editable install maps modules by name, so a new file asks for a new one.
MODULES := $(shell find moe_graph -name '*.py' | sort | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.installed-$(MODULES)
JOBS ?= 2

# One thread per test process: the tests run side by side.
TEST_ENV := OMP_NUM_THREADS=1 MOE_GRAPH_QUIET=1 HF_HUB_OFFLINE=1

.PHONY: setup demo test vectors zoo zoo-table lint format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml CMakeLists.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/mixtral.py

test: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) -m "not zoo" tests

vectors: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.vectors --why

zoo: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) -m zoo tests

zoo-table: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.zoo

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy moe_graph
	$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.h,$(SOURCES))

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(SOURCES))

bench: $(STAMP)
	HF_HUB_OFFLINE=1 MOE_GRAPH_QUIET=1 $(BIN)/python benchmarks/moe_block.py
	MOE_GRAPH_QUIET=1 $(BIN)/python -m benchmarks.routing_ops
	MOE_GRAPH_QUIET=1 $(BIN)/python -m benchmarks.compile_time

clean:
	rm -rf $(VENV) build dist moe_graph/emulator/lib moe_graph_dump
