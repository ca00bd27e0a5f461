# Eight commands.  Each sets up what it needs on a fresh machine and prints what it does; the second time it starts at once.
#
#   make serve [MODEL=org/name or ./dir] [ARGS='--port 9000']   serve a model; the small demo model without MODEL
#   make test  [ARGS='tests/wire -x']                           all tests that need no GPU
#   make test NIGHTLY=1                                         the rest of the matrices that `make test` samples
#   make test GPU=1                                             tests that need a GPU, or two; prints what it skipped and why
#   make test COVERAGE=1                                        all tests, and the share of lines that they execute
#   make clients [ARGS='-k stream']                             other clients against a server: LangChain, Claude Code and more
#   make lint                                                   format, lint, types, length of functions, dead code, words
#   make bench [ARGS='--rounds 1']                              tests of speed; tokens per second against other systems
#   make chaos [ARGS='--minutes 5 --seed 1']                    load and faults: is a token lost or repeated?
#   make chaos ARGS='mixed --minutes 10'                         faults and hostile answers: is a text changed?
#   make chaos ARGS='soak --operations 1000000'                 the scheduler alone: is the block accounting balanced?
#   make chaos ARGS='fuzz --requests 100000'                    hostile clients: does a gateway fail, stall or leak?
#   make chaos ARGS='requests --requests 100000'                mutated requests: is each answered as docs/api.md says?
#   make chaos ARGS='answers --cases 500'                       hostile answers: does a gateway stall or lose text?
#   make chaos ARGS='same-tokens --requests 500'                are token ids equal: alone, many at once, with engines killed?
#   make chaos ARGS='schemas --draws 2000'                      structured output: do answers to random schemas validate?
#   make figures [ARGS=--list]                                  measure again what README and docs/ show; two hours
#   make images [ARGS='--folder ./dir']                         the Docker images, built with buildah, started and asked (root)
#
# Needs Python 3.11 or 3.12 (PYTHON=... picks one) and a C++ compiler.

SHELL := /bin/bash
# Packages are installed without bytecode.  Some shells and images set PYTHONDONTWRITEBYTECODE: then imports would not
# write it either, and each start would take ten seconds longer.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
RUN := .venv/bin/python
SERVING := .venv/.serving
INSTALLED := .venv/.installed
KERNELS := .venv/.kernels
MODEL ?=
ARGS ?=

NODE := $(if $(shell command -v npm),.venv-clients/node/.installed)
CLIENTS := $(patsubst %,.venv-clients/%/.installed,openai-2 openai-3 benchmarks) .venv-clients/benchmarks/.vllm $(NODE)
FETCHED := $(patsubst %,.venv-clients/%.fetched,openai-2 openai-3 benchmarks vllm) $(NODE)

.PHONY: serve test clients fetch-clients lint bench chaos figures images
.SECONDARY: $(FETCHED)
.DELETE_ON_ERROR:

serve: $(KERNELS)
	@$(RUN) -m quire.service.start serve $(MODEL) $(ARGS)

# Most tests wait for processes, so four files run at a time on two cores: `auto` follows the cores of this container
# (tests/pace.py).  Tests named in ARGS run one by one.  COVERAGE=1 measures every process that a test starts as well.
HERE := not gpu and not multi_gpu and not perf
NIGHTLY ?=
GPU ?=
COVERAGE ?=
ERASE_COVERAGE := $(if $(COVERAGE),$(RUN) -m coverage erase;)
SHOW_COVERAGE := $(if $(COVERAGE),$(RUN) -m coverage combine -q && $(RUN) -m coverage report;)
PYTEST := $(RUN) -m $(if $(COVERAGE),coverage run -m )pytest
test: $(INSTALLED) $(KERNELS)
ifneq ($(NIGHTLY),)
	@failed=0; $(ERASE_COVERAGE) $(PYTEST) -m "nightly and $(HERE)" -n auto --dist loadfile $(ARGS) || failed=1; \
	  $(SHOW_COVERAGE) exit $$failed
else ifneq ($(GPU),)
	@$(PYTEST) -m "(gpu or multi_gpu) and not nightly and not perf" $(or $(ARGS),tests/kernels tests/executor)
else ifeq ($(ARGS),)
	@failed=0; $(ERASE_COVERAGE) $(PYTEST) -m "not nightly and $(HERE)" -n auto --dist loadfile || failed=1; \
	  $(SHOW_COVERAGE) exit $$failed
else
	@failed=0; $(ERASE_COVERAGE) $(PYTEST) -m "$(HERE)" $(ARGS) || failed=1; $(SHOW_COVERAGE) exit $$failed
endif

clients: $(INSTALLED) $(KERNELS) $(CLIENTS)
	@$(RUN) -m tests.clients $(ARGS)

fetch-clients: $(FETCHED)

lint: $(INSTALLED)
	@$(RUN) -m ruff format --check .
	@find csrc -regex '.*\.\(cpp\|h\|cu\|cuh\)' | xargs .venv/bin/clang-format --dry-run --Werror
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) .ci/function_lines.py
	@$(RUN) .ci/prose.py --check
	@$(RUN) -m vulture

bench: $(INSTALLED) $(KERNELS)
	@$(RUN) -m pytest -q -m "perf and not gpu"
	@$(RUN) -m quire.loadtest.throughput $(ARGS)

chaos: $(INSTALLED) $(KERNELS)
	@$(RUN) -m tests.system.chaos $(ARGS)

figures: $(INSTALLED) $(KERNELS)
	@$(RUN) -m quire.loadtest remeasure $(ARGS)

# Not part of `make test`: it needs root, 20 GB of disk and a quarter of an hour.
images: $(INSTALLED)
	@$(RUN) -m tests.system.images $(ARGS)

# Packages for serving, then packages for tests.  One pip call installs all packages for serving, so that the constraints
# choose torch's build before a package that depends on it does.  Python compiles a module at its first import.
PIP_INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c .ci/constraints.txt
$(SERVING): pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "Quire needs Python 3.11 or 3.12, and found neither: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(RUN) || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "Installing the packages for serving, as pinned in .ci/constraints.txt (a minute)"
	@$(PIP_INSTALL) -e '.[engine,cli,embedded]'
	@touch $@

$(INSTALLED): $(SERVING)
	@echo "Installing the packages for tests (a minute)"
	@$(PIP_INSTALL) -e '.[dev]'
	@# In tests warnings are errors, and compiling some packages warns.  Some have files for other versions of Python.
	@$(RUN) -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	@touch $@

# One environment per version of the official OpenAI client, and one for benchmarks, which find torch and transformers in
# .venv.  Every package is pinned and installed without its dependencies; `pip check` reports missing ones.
LIBRARY := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
.venv-clients/benchmarks/.installed: SHARES := yes
.venv-clients/%/.installed: .ci/clients/%.txt .venv-clients/%.fetched | $(INSTALLED)
	@echo "Installing the clients of $<"
	@$(RUN) -m venv --clear .venv-clients/$*
	$(if $(SHARES),@$(RUN) $(LIBRARY) >$$(.venv-clients/$*/bin/python $(LIBRARY))/serving.pth)
	@.venv-clients/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
	  --find-links .venv-clients/$*-wheels -r $<
	@.venv-clients/$*/bin/python -m pip check --quiet --disable-pip-version-check
	@touch $@

# A separate step, so that .ci/run can distinguish an unreachable package index from clients whose versions conflict.
.venv-clients/%.fetched: .ci/clients/%.txt | $(INSTALLED)
	@echo "Fetching the clients of $<, as pinned there (a minute)"
	@$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir .venv-clients/$*-wheels -r $<
	@touch $@

# vLLM's benchmark: its source, built without kernels, since its wheels and what they need take gigabytes.
.venv-clients/vllm.fetched: .ci/clients/vllm.txt .venv-clients/benchmarks/.installed
	@echo "Fetching the packages of $<, and building vLLM without kernels (a minute)"
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$$(sed -n 's/^vllm==//p' $<) .venv-clients/benchmarks/bin/python \
	  -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm \
	  --wheel-dir .venv-clients/vllm-wheels -r $<
	@touch $@

.venv-clients/benchmarks/.vllm: .venv-clients/vllm.fetched
	@.venv-clients/benchmarks/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
	  --find-links .venv-clients/vllm-wheels -r .ci/clients/vllm.txt
	@touch $@

# Node programs, as pinned in the lock file; skipped if npm is missing.
.venv-clients/node/.installed: tests/clients/node/package.json tests/clients/node/package-lock.json | $(INSTALLED)
	@echo "Fetching the Node programs of $<, as pinned there (a minute, 700 MB)"
	@mkdir -p $(@D) && cp $^ $(@D) && cd $(@D) && npm ci --silent --no-audit --no-fund
	@touch $@

$(KERNELS): $(SERVING) $(wildcard engine/executor/ops/*.py) engine/executor/kernels_build.py $(shell find csrc -type f)
	@echo "Building the kernels of csrc, unless they are built already"
	@$(RUN) -m quire.engine.executor.ops >/dev/null
	@touch $@
