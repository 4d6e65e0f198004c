# Two commands: `make demo` trains three arms on Tiny Shakespeare; `make test` runs the tests. Each sets itself up first.
PYTHON ?= python3
VENV := .venv

.PHONY: demo test test-slurm setup lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV)
	touch $@

demo: setup
	$(VENV)/bin/python -m scripts.demo

test: setup
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slurm: setup # installs and starts Slurm on this machine: as root, with ALLOW_INSTALL=1
	bash tests/slurm/run.sh

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean:
	rm -rf $(VENV) runs build *.egg-info
