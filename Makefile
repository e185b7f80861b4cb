# Everything a contributor or a first-time user runs. Each target does its own set-up.
PYTHON ?= python3
BIN := .venv/bin
# Tests on two cores: a file each at a time, one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo dev test test-all test-gpu check format build clean

demo: .venv/.installed
	$(BIN)/exl2flow convert demo/model --out demo-exl2 --bpw 4.0 \
	    --rows 16 --row-tokens 512 --measure-rows 16 --measure-row-tokens 512 --validate-rows 16 \
	    --validate-row-tokens 512

# A user's environment: the package and its pinned dependencies.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# A contributor's environment: the same plus the development tools.
.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

dev: .venv/.installed-dev

test: dev
	$(PYTEST) -m "not slow and not gpu and not multigpu and not network" $(ARGS)

test-all: dev
	$(PYTEST) -m "not gpu and not multigpu and not network" $(ARGS)

test-gpu: dev
	$(BIN)/python -m pytest -m "gpu" $(ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs core kernels model quant tasks flows inference
	$(BIN)/mypy

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf .venv build dist *.egg-info demo-*/ .exl2flow
