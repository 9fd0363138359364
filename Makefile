# make run    sees Outrider at work: one prompt, plain and speculative
# make test   runs the tests
# make check  format, lint, types
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS=... goes to pip, ARGS=... to what is run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

DEMO := --k 4 --max-tokens 120 --ignore-eos "def read_lines(path: str) -> list[str]:"

.PHONY: run test check fix clean

run: $(VENV)/.installed
	$(BIN)/outrider compare $(or $(ARGS),$(DEMO))

test: $(VENV)/.installed-dev
	@scripts/test $(ARGS)

check: $(VENV)/.installed-dev
	@scripts/check

fix: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Outrider needs Python 3.10 or newer: make PYTHON=python3.12")'
	@echo "installing Outrider into $(VENV) (a few minutes the first time: PyTorch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements.txt
	@$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	@$(PIP) -r requirements-dev.txt
	@touch $@
