# `make demo`, `make test` and `make check` need only python3 (3.11 or later) and make; each sets up what it uses.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := bash

.PHONY: demo test check clean

# Every demo gets a run folder of its own, so that it never resumes a finished one.
demo: $(VENV)/.demo-ready
	@$(BIN)/python train.py --config configs/demo.yaml --set run.dir=runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.dev-ready
	@$(BIN)/python -m pytest

check: $(VENV)/.dev-ready
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest -q tests/test_layering.py

clean:
	rm -rf $(VENV) *.egg-info

# The tests train on the demo's text too, so dev contains demo.
$(VENV)/.demo-ready: EXTRAS := demo
$(VENV)/.dev-ready: EXTRAS := demo,dev

# Of pip's output this shows a line for each package, and all warnings and errors.
$(VENV)/.demo-ready $(VENV)/.dev-ready: pyproject.toml | $(BIN)/pip
	@echo "installing ntpjax[$(EXTRAS)] into $(VENV): about a minute, or more on a slow network"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[$(EXTRAS)]' | \
		while read -r verb name _; do \
			case "$$verb $$name" in Collecting*) echo "  $$name";; *\ collected) echo "  unpacking all";; esac; \
		done
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "ntpjax needs Python 3.11 or later, and $(PYTHON) is not; name one with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
