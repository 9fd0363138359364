# make run    shows a race: one prompt, plain and speculative, side by side, at the cost of a 350M model
# make test   runs the tests
# make check  format, lint, types
# make licences  writes docs/licences.md, after scripts/lock has changed versions
# make fix    formats the code and applies ruff's corrections
# make clean  deletes .venv
# make sweep  tries every architecture of the installed transformers and writes docs/models.md (half an hour)
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS=... goes to pip, ARGS=... to what is run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0  # no hash: this takes the CPU build (2.13.0+cpu) where the package index offers one
# Docker images often forbid Python to write bytecode: each start would compile all imports again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what it imports; most of transformers' files are never imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile $(PIP_ARGS)

# The kernels need only PyTorch, so they are compiled while pip waits for the network. Without them torch's own are used.
KERNELS := PYTHONPATH=src $(BIN)/python -W ignore -c "from outrider import native; native.load()"

.PHONY: run test check sweep licences fix clean

run: $(VENV)/.installed
	@$(BIN)/outrider compare $(or $(ARGS),-k 4 --inflate 350m --compile never)

test: $(VENV)/.installed-dev
	@scripts/test $(ARGS)

check: $(VENV)/.installed-dev
	@scripts/check

sweep: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python bench/sweep.py $(ARGS)

licences: $(VENV)/.installed-dev
	@$(BIN)/python docs/make_licences.py

fix: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outrider needs Python 3.11 or newer: make PYTHON=python3.12")'
	@scripts/announce "making $(VENV)" $(PYTHON) -m venv $(VENV)
	@scripts/announce "installing PyTorch into $(VENV)" $(PIP) --no-deps $(TORCH) typing_extensions
	@scripts/announce "importing PyTorch, or installing its CUDA libraries" \
		sh -c '$(BIN)/python -W ignore -c "import torch" 2>/dev/null || $(PIP) $(TORCH)'
	@scripts/announce "installing the requirements and compiling the CPU kernels" \
		sh -c '$(KERNELS) & $(PIP) -r requirements.txt || { code=$$?; kill $$!; exit $$code; }; wait'
	@scripts/announce "installing Outrider" $(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	@scripts/announce "installing what the tests need" $(PIP) -r requirements-dev.txt
	@touch $@
