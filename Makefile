# Everything happens in .venv, made from requirements.lock, which serves each supported Python. The
# hashes of all packages are checked. Nothing outside this folder is changed.
PYTHON ?= $(or $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
  2>/dev/null && echo $$python && break; done),$(error No Python 3.11 to 3.13 with venv on PATH. \
  Install one, or name it: make PYTHON=/path/to/python3.12))
ARGS ?=
# PyPI has no CPU build of torch; this index is asked only when pip does not know the wheel already.
# Where neither has a wheel, PyPI's build with CUDA (3 GB) takes its place: requirements-torch.lock.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The page, or a folder, with torch's wheels, whose hashes `make lock` writes.
TORCH_WHEELS ?= $(TORCH_INDEX)/torch/
# The lines of one package in the lock, its hashes included.
LOCKED = sed -n '/^$(1)==/,/[^\\]$$/p' requirements.lock
PIP_INSTALL := .venv/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes
BIN := .venv/bin
export RAY_DATA_DISABLE_PROGRESS_BARS ?= 1
# Where it is set, every process compiles all that it imports: vLLM takes 14 s of a core, not 8.
unexport PYTHONDONTWRITEBYTECODE

# Most tests use one core. Two processes fill two, and each has servers of its own to share.
PROCESSES ?= 2
# Programs to do without, by the names in tests/programs.py: their tests are skipped.
WITHOUT ?=
export RAYBATCH_TEST_WITHOUT := $(WITHOUT)
PYTEST_M := -m pytest -q --durations=10 -n $(PROCESSES) --dist loadscope --no-loadscope-reorder
PYTEST := $(BIN)/python $(PYTEST_M)

.PHONY: help demo check test test-all rest nightly programs lint types coverage mutants chaos failures versions bench tour docs lock clean
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.venv/.ready: requirements.lock requirements-torch.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(call LOCKED,torch) | $(PIP_INSTALL) --no-compile -r /dev/stdin 2>/dev/null \
	  || $(call LOCKED,torch) | $(PIP_INSTALL) --no-compile --extra-index-url $(TORCH_INDEX) -r /dev/stdin \
	  || $(PIP_INSTALL) --no-compile -r requirements-torch.lock
	$(call LOCKED,uv) | $(PIP_INSTALL) -r /dev/stdin
	sed '/^torch==/,/[^\\]$$/d' requirements.lock \
	  | $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r -
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/.ready ## Run the main job: company -> industry with real vLLM on the CPU
	@$(BIN)/raybatch demo $(ARGS)

check: .venv/.ready ## One room: lint, types and its tests, ROOM=ledger
	$(BIN)/ruff check prefect_raybatch/$(ROOM) tests/$(ROOM)
	$(BIN)/ruff format --check prefect_raybatch/$(ROOM) tests/$(ROOM)
	$(BIN)/mypy
	$(PYTEST) -m "not whole and not e2e" tests/$(ROOM) $(ARGS)

test: TIER = test
test: TESTS = -m "not whole"
test: programs lint ## Lint, types, all quick tests, and each kind of run once with real vLLM
	@$(MAKE) --no-print-directory -j 2 types tests TESTS='$(TESTS)'
	@$(if $(WITHOUT),echo "Left out: the tests that need $(WITHOUT)")

test-all: TESTS = -m "not nightly"
test-all: programs lint ## Also the browser, the wheel and more kinds of real runs
	@$(MAKE) --no-print-directory -j 2 types tests TESTS='$(TESTS)'
	@$(if $(WITHOUT),echo "Left out: the tests that need $(WITHOUT)")

rest: programs ## What test-all has beside test
	@$(MAKE) --no-print-directory tests TESTS='-m "whole and not nightly"'

nightly: programs ## What no change waits for: benchmark scripts, further variants, campaigns
	@failed=0; \
	$(MAKE) --no-print-directory tests TESTS='-m nightly' || failed=1; \
	$(MAKE) --no-print-directory chaos || failed=1; \
	exit $$failed

TIER = all
programs: ## Install the programs that the tests need where they are missing
	@$(PYTHON) tests/programs.py --tier $(TIER) --without "$(WITHOUT)"

.PHONY: tests
tests: .venv/.ready
	$(PYTEST) $(TESTS) $(ARGS)

lint: .venv/.ready ## Ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready ## Type checker
	$(BIN)/mypy

coverage: .venv/.ready ## Which lines the unit tests reach, in the processes that they start too
	@rm -rf .coverage && mkdir .coverage
	$(BIN)/coverage run $(PYTEST_M) -m "not e2e" $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered

# mutmut is not in the lock: only this command needs it. It lies beside .venv, with hashes of its own.
.mutants/tools/.ready: .venv/.ready tests/mutants/requirements.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --target .mutants/tools --no-deps --require-hashes \
	  -r tests/mutants/requirements.txt
	@touch $@

SAMPLE ?= all

mutants: .mutants/tools/.ready ## Survivors of generated mutants of ROOM=ledger, 20 minutes at a time: SAMPLE=300
	PYTHONPATH=tests $(BIN)/python -m mutants $(ROOM) --sample $(SAMPLE) $(ARGS)

# Of the simulation, which comes first; its seed is a new one each time.
SCHEDULES ?= 10000

chaos: programs .venv/.ready ## Faults injected at random, then every row checked: ARGS="--seed N --trials N"
	@test ! -e tests/test_fuzz.py || $(BIN)/python -m pytest -q tests/test_fuzz.py --hypothesis-profile=chaos
	PYTHONPATH=tests $(BIN)/python -m model
	PYTHONPATH=tests $(BIN)/python -m simulation --schedules $(SCHEDULES) --mutants all --processes $(PROCESSES)
	RAYBATCH_TEST_KILLS=200 $(BIN)/python -m pytest -q tests/runs/test_endpoint_kills.py -k kills_lose
	PYTHONPATH=tests $(BIN)/python -m chaos $(ARGS)

failures: programs .venv/.ready ## Nights that fail, each seen in the page: pictures into docs/images
	PYTHONPATH=tests $(BIN)/python -m failures $(ARGS)

versions: .venv/.ready ## Contract tests and a small run with each supported vLLM, the newest Ray and Prefect
	@$(BIN)/python tests/versions.py --wheels $(TORCH_WHEELS) $(ARGS)

bench: .venv/.ready ## Peers and us side by side on this machine
	$(BIN)/python benchmarks/cpu.py $(ARGS)

tour: programs .venv/.ready ## Run docs/tutorials/first-run.md for real; write its outputs and pictures anew
	PYTHONPATH=tests $(BIN)/python -m tour $(ARGS)

docs: .venv/.ready ## The documentation as a site, in site/; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

COMPILE = uv pip compile -q --universal --python-version 3.11 --fork-strategy fewest \
  --generate-hashes --no-header --no-annotate
# intel-openmp needs intel-cmplr-lib-ur in its wheel for Linux alone, and uv reads that of Windows.
lock: ## Resolve the locks anew for all Pythons, with the hashes of all wheels (needs uv)
	printf '%s\n' 'torch==2.13.0+cpu' "intel-cmplr-lib-ur==2024.2.1 ; platform_machine == 'x86_64'" uv hatchling editables \
	  | $(COMPILE) --find-links $(TORCH_WHEELS) \
	  --extra cpu --extra kubernetes --extra delta --extra iceberg --extra lance --extra huggingface --extra postgresql --extra polars --extra docs --group dev pyproject.toml - -o requirements.lock
	echo torch===2.13.0 | $(COMPILE) - \
	  | sed -n '/^\(torch\|cuda-\|nvidia-\)/,/[^\\]$$/p' > requirements-torch.lock

clean: ## Remove what was made here
	rm -rf .venv .mutants raybatch-demo dist build site
