# make demo    set everything up, run the daemon on the embedded CPU engine, show a chain both ways
# make test    set up and run the tests, real engine included
# make check   format, lint, types, layers
# make benchmarks-page    make docs/benchmarks.md, its pictures and the summary from benchmarks/results
# make clean   remove what the others made (the fetched model stays in the user's cache)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format benchmarks-page clean

help:
	@sed -n 's/^# //p' $(MAKEFILE_LIST)

setup: $(STAMP)

# pip finds vLLM's CPU build of torch where an index offers it; elsewhere uv knows where it is.
# A torchvision that was built for another torch breaks vLLM's import, and text models need none of the three.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pingpongd needs Python 3.11 or later; name one: make PYTHON=python3.11")'
	@echo "Setting up $(VENV): vLLM's CPU build and the tools, about 1 GB once ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --editable '.[cpu]' --group dev || { \
		echo "pip did not find everything; trying uv ..."; \
		$(BIN)/python -m pip install --quiet uv && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu --editable '.[cpu]' --group dev; }
	@for package in torchvision torchaudio torchcodec; do \
		if $(BIN)/python -m pip show --quiet $$package 2>/dev/null && ! $(BIN)/python -c "import $$package" 2>/dev/null; then \
			$(BIN)/python -m pip uninstall --quiet --yes $$package; fi; done
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks-page: $(STAMP)
	$(BIN)/python benchmarks/page.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
