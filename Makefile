# make help lists what there is; every target can be run again at any time.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEMO := .venv-demo
TEST := .venv-test
STORE := .xmem-demo
SECONDS_EACH ?= 300

.PHONY: help demo test check docs bench fuzz clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(DEMO)/installed  ## install without torch, read the examples, print two verdicts and one SQL answer
	@rm -rf $(STORE)
	@export XMEM_STORE=$(STORE) PATH="$(CURDIR)/$(DEMO)/bin:$$PATH"; source examples/demo.sh

test: $(TEST)/installed  ## install everything (torch included) and run every test
	$(TEST)/bin/python -m ruff check .
	$(TEST)/bin/python -m ruff format --check .
	$(TEST)/bin/python -m mypy xmem
	$(TEST)/bin/python -m pytest -n auto --dist loadgroup $(PYTEST_ARGUMENTS)

check: $(TEST)/installed  ## lint, types and the tests that take seconds
	$(TEST)/bin/python -m ruff check .
	$(TEST)/bin/python -m ruff format --check .
	$(TEST)/bin/python -m mypy xmem
	$(TEST)/bin/python -m pytest -n auto --dist loadgroup -m 'not slow and not network' $(PYTEST_ARGUMENTS)

docs: $(TEST)/installed  ## write docs/schema.md, docs/cli.md and the frozen option list anew
	$(TEST)/bin/python docs/generate.py

bench: $(TEST)/installed  ## measure, and write docs/benchmarks.md
	$(TEST)/bin/python benchmarks/run.py

fuzz: $(TEST)/installed  ## minutes of broken and hostile input for each reader (SECONDS_EACH=300)
	$(TEST)/bin/python -m pip install --quiet atheris || echo "no atheris here: inputs are mutated at random"
	for script in tests/fuzz/fuzz_*.py; do $(TEST)/bin/python "$$script" --seconds $(SECONDS_EACH); done

clean:  ## remove environments, stores and caches that these targets made
	rm -rf $(DEMO) $(TEST) $(STORE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(DEMO)/installed: pyproject.toml
	@echo "installing xmem without torch into $(DEMO)"
	@test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	@$(DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(TEST)/installed: pyproject.toml constraints-test.txt
	@echo "installing xmem with all extras into $(TEST): a few minutes, 6 GB"
	@test -x $(TEST)/bin/python || $(PYTHON) -m venv $(TEST)
	@$(TEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-test.txt -e '.[all,dev]'
	@touch $@
