# Targets for people and for CI; `make help` lists them. Needs a Python from 3.11 to 3.14 and make, nothing else.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-by-make
DEMO_STAMP := $(VENV)/.made-for-demo
DEMO_NEEDS := numpy safetensors pydantic typer rich tomli-w filelock jinja2 psutil pillow
EXTRAS := partitioners,text,audio,hub,peft,ray,flower,plots,export,executorch,privacy,secure,tensorboard,wandb,mlflow,docs,dev
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
# pip shows its progress to people.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install $(if $(CI),-qq) -c constraints.txt
$(DEMO_STAMP): PIP += --no-compile

# The Python that makes the environment: the first of these that runs and is in range, or `make env PYTHON=...`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c '$(IN_RANGE)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Tests start many processes of Python: none of them compiles the package anew, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE

# Further options for pytest: `make test PYTEST_ARGS='-k layout -x'`.
PYTEST_ARGS ?=

# How many mutants `make mutants` draws: each takes some 5 s of a core, or a minute or two where it survives.
SAMPLE ?= 500

# The parts that `make bench` and `make bench-check` run, such as `make bench PARTS="round codec"`; none: all of them.
PARTS ?=

# The networks that `make zoo-table` measures, by words of their names; none: all of them.
ONLY ?=

.DEFAULT_GOAL := help
.PHONY: help env package test-package check-files sbom demo fleet-demo test test-all test-quick test-slow test-fleet test-fleet-all test-browser test-zoo zoo-table lint audit format bench bench-check peers-env results mutants docs docs-open clean clean-env

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r a b; do printf '%-18s %s\n' "$$a" "$$b"; done

env: $(STAMP) ## make .venv: all extras, the exact versions of constraints.txt

# Makes .venv where there is none, and installs torch, in a command of its own: pip then keeps to the build found for this
# machine and fetches nothing that another build would need.
define MAKE_VENV
	@if [ -d $(VENV) ] && ! $(BIN)/python -c '$(IN_RANGE)' 2>/dev/null; then \
		echo "make: $(VENV) has no working Python from 3.11 to 3.14. Remove it with 'make clean-env', then try again." >&2; \
		exit 2; \
	fi
	@if [ ! -d $(VENV) ]; then \
		python='$(PYTHON)'; \
		if [ -z "$$python" ]; then \
			echo "make: no Python from 3.11 to 3.14 found. Install one, or name it: make PYTHON=/path/to/python3.11 env" >&2; \
			exit 2; \
		fi; \
		if ! "$$python" -c '$(IN_RANGE)'; then \
			echo "make: PYTHON=$$python does not run, or is not from 3.11 to 3.14." >&2; \
			exit 2; \
		fi; \
		echo "Making $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 2; }; \
	fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "Installing $$(grep '^torch==' constraints.txt)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
endef

# An environment that somebody made by hand is kept, and what is missing or differs is installed.
$(STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	@echo "Installing the other packages of constraints.txt and FleetFit itself (editable)"
	@$(PIP) hatchling editables setuptools
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

# A third of the bytes of `make env`: without extras, without what only tables, intervals and derivation need, and
# without compiled copies of modules, most of which are never imported.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	@echo "Installing what the demo needs and FleetFit itself (editable)"
	@$(PIP) $(DEMO_NEEDS) hatchling editables
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## train FleetFit's method, ScaleFL, HeteroFL and the smallest model on handwritten digits, and compare them
	$(BIN)/fleetfit demo
	@[ -f $(STAMP) ] || echo "$(VENV) has what the demo needs. For your own runs, install the rest: $(BIN)/pip install -c constraints.txt -e '.[plots]'"

# Linters have a core of their own while workers collect tests, and share it with the tests after that.
test: env ## linters, types, import directions, and the quick tests (gpu ones skip where there is no GPU)
	@$(MAKE) --no-print-directory -j 2 lint test-quick

test-all: env ## the same with the slow tests
	@$(MAKE) --no-print-directory -j 2 lint test-slow

test-quick: env
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-slow: env
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile -m "not network and not fleet and not browser and not zoo" $(PYTEST_ARGS)

test-fleet: env ## whole fleets of real processes on this machine: faults, restarts, TLS and keys
	$(BIN)/pytest -m "fleet and not slow" tests/fleet -n 4 --dist loadfile $(PYTEST_ARGS)

test-fleet-all: env ## the same with the slow ones: secure and private fleets
	$(BIN)/pytest -m fleet tests/fleet -n 4 --dist loadfile $(PYTEST_ARGS)

test-browser: env ## the pages in a headless Chromium (Debian: chromium, chromium-driver); skips where there is none
	$(BIN)/pytest -m browser tests/report $(PYTEST_ARGS)

test-zoo: env ## networks of timm, torchvision, transformers and others are derived and train; skips packages that are absent
	$(BIN)/pytest -m zoo tests/derivation/test_networks.py -n 2 $(PYTEST_ARGS)

zoo-table: env ## measure them anew, into tests/bed/networks.json and docs/networks.md; `make zoo-table ONLY="timm Bert"`
	PYTHONPATH=tests $(BIN)/python -m support.networks $(ONLY)
	$(BIN)/python docs/generate.py

fleet-demo: env ## a SuperLink and four unequal nodes on this machine, with TLS and keys, train one model; once with [secure]
	$(BIN)/python examples/fleet/demo.py
	$(BIN)/python examples/fleet/demo.py --secure

lint: env ## linters, security (ruff's S), format, types and import directions only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# In an environment of its own, since it pins packages that others pin otherwise. It asks PyPI for known vulnerabilities.
audit: ## ask PyPI whether a pinned version has a known vulnerability; fails where it cannot be asked
	[ -x .venv-audit/bin/pip-audit ] || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install -q pip-audit; }
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# Also in an environment of their own, for the same reason.
RELEASE := .venv-release/bin
.venv-release/.made-by-make: release/requirements.txt
	@$(PYTHON) -m venv .venv-release
	@$(RELEASE)/python -m pip --disable-pip-version-check --no-input install -qq -r release/requirements.txt
	@touch $@

package: .venv-release/.made-by-make ## build dist/: an sdist, a wheel from it, and what PyPI would say of them
	@rm -rf dist
	$(RELEASE)/python -m build
	$(RELEASE)/twine check --strict dist/*

test-package: env package ## install them into an empty environment, run the demo, build again and test from the sdist
	$(BIN)/pytest -m network tests/release $(PYTEST_ARGS)

sbom: env .venv-release/.made-by-make ## dist/fleetfit.spdx.json: what a release consists of, from constraints.txt, in SPDX
	$(RELEASE)/python release/bill_of_materials.py \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" dist/fleetfit.spdx.json
	$(RELEASE)/pyspdxtools -i dist/fleetfit.spdx.json

CHECK := $(RELEASE)/check-jsonschema -q --builtin-schema
check-files: .venv-release/.made-by-make ## hold workflows, issue forms, compose.yaml and CITATION.cff against their schemas
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) vendor.dependabot .github/dependabot.yml
	$(CHECK) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/question.yml
	$(CHECK) vendor.compose-spec containers/compose.yaml
	$(CHECK) vendor.citation-file-format CITATION.cff

format: env ## rewrite the files as the linters want them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env ## speed against a bare loop, a naive one and a plain copy, measured in one run; `make bench PARTS="round codec"`
	$(BIN)/python -m benchmarks $(PARTS)

bench-check: env ## the same parts against the ratios written down in benchmarks/written.toml; fails where one is worse
	$(BIN)/python -m benchmarks --check $(PARTS)

# The packages of .venv are seen from it, so that both sides compute with the same PyTorch.
peers-env: env ## make .venv-peers with pfl-research, which `python -m benchmarks peers` compares with
	$(BIN)/python -m venv .venv-peers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages-of-venv.pth"
	.venv-peers/bin/python -m pip --disable-pip-version-check --no-input install -q -r benchmarks/peers/requirements.txt

results: env ## judge the papers' claims from experiments/results/, and write docs/results.md with its figures
	$(BIN)/python -m experiments.verdicts

# Not --quiet, with which no warning counts. Material for MkDocs prints a notice on its successor at each build; mkdocs.yml says what we think of it.
docs: env ## the documentation as a site in build/site: runs the notebooks; warnings are errors, links are checked
	$(BIN)/python docs/site/notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/site/check.py build/site

docs-open: docs ## the same, shown at http://127.0.0.1:8000 until Ctrl-C
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

mutants: env ## how many small changes of the core the tests notice; `make mutants SAMPLE=40` draws fewer
	$(BIN)/python tests/mutants/mutants.py --sample $(SAMPLE)

clean: ## remove caches and builds; keeps .venv and runs/
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage htmlcov *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

clean-env: ## remove .venv, .venv-peers, .venv-audit and .venv-release
	rm -rf $(VENV) .venv-peers .venv-audit .venv-release
