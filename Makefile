# Each target makes what it needs on a machine with Python 3.11, pip and PyPI.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
BIN := $(VENV)/bin
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

.PHONY: run test chromium lint bench peers gpu-compile gpu-check clean

run: $(VENV)/.installed
	$(BIN)/rolecall

test: lint chromium
	# Compiling keeps one core busy; a file's tests share what they compile.
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# The page of a sweep is tested in a browser; this is how Debian installs it.
chromium:
	@command -v chromium >/dev/null || \
		{ $(SUDO) apt-get update && $(SUDO) apt-get install --yes chromium; }

# Beside other engines, one machine and one run: 20 minutes on two cores.
bench: $(VENV)/.installed peers
	$(BIN)/python -m benchmarks --peers-python $(PEERS)/bin/python

# Those engines: llama.cpp is compiled for this machine, which takes minutes and a C++ compiler.
peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --upgrade pip
	$(PEERS)/bin/python -m pip install --requirement benchmarks/requirements.txt
	touch $@

# For accelerators that are not here: minutes per deployment the first time.
gpu-compile: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu_compile.py

# On a machine that has accelerators.
gpu-check: $(VENV)/.installed
	$(BIN)/python -m pytest -rA tests/gpu_check.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip before 24 gives up on the requirements of max[serve], so it comes first.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(PEERS)
