# Everything a contributor or a first-time user runs. Each target does its own set-up.
PYTHON ?= python3
# `make test-gpu BIN=/folder/of/python` uses an environment that exists and installs nothing.
BIN := .venv/bin
DEV := $(if $(filter command,$(origin BIN)),,dev)
# Tests on two cores: a file each at a time, one thread each; end-to-end tests, the longest, first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

LOWEST := .venv-lowest/bin

.PHONY: demo dev quick test test-all test-base test-gpu test-cards sanitize test-lowest campaign check format build clean

# The extra with which a GPU is used: cuda13 or cuda12, whichever the driver supports, else none. `make demo CUDA=none`
# chooses; asked for by `demo` only, because `nvidia-smi` can take a second.
CUDA = $(shell case "$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]*Version *: *\([0-9]*\).*/\1/p')" in \
    (12) echo cuda12;; (1[3-9]) echo cuda13;; (*) echo none;; esac)

.SECONDEXPANSION:
demo: .venv/.installed .venv/.with-$$(CUDA)
	$(BIN)/exl2flow convert demo/model --out demo-exl2 --bpw 4.0 \
	    --rows 16 --row-tokens 512 --measure-rows 16 --measure-row-tokens 512 --validate-rows 16 \
	    --validate-row-tokens 512 --validate-text demo/heldout.txt

# A user's environment: the package and its pinned dependencies.
.venv/.installed: pyproject.toml constraints.txt
	@echo "installing exl2flow and its libraries (torch is the largest) into .venv:" \
	    "2 to 6 GB, a few minutes the first time; pip reports only errors"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[convert,prefect]'
	touch $@

.venv/.with-cuda12 .venv/.with-cuda13: .venv/.installed
	@echo "installing what uses the GPU ($(@:.venv/.with-%=%)); \`make demo CUDA=none\` leaves it out"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(@:.venv/.with-%=%)]'
	touch $@

.venv/.with-none: .venv/.installed
	touch $@

# A contributor's environment: the same plus the development tools.
.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# What a person gets without extras: it generates, chats and serves, and says what converting needs.
.venv-base/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-base
	.venv-base/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

test-base: .venv-base/.installed
	.venv-base/bin/python tests/support/base.py .venv-base/bin demo/model

# The lowest versions that pyproject.toml allows; pip has no such choice, uv has. Prefect gets a home of its own,
# because it cannot read the database of a newer version.
.venv-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv --clear .venv-lowest
	$(LOWEST)/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/uv pip install --quiet --python $(LOWEST)/python --resolution lowest-direct -e '.[dev]'
	touch $@

dev: .venv/.installed-dev

test: dev
	$(PYTEST) -m "not slow and not gpu and not multigpu and not network" $(ARGS)

# What one runs before a commit: modules that take no longer than a few seconds.
quick: dev
	$(PYTEST) -m "not slow and not gpu and not multigpu and not network" --quick $(ARGS)

test-all: dev
	$(PYTEST) -m "not gpu and not multigpu and not network" $(ARGS)

test-gpu: $(DEV)
	$(BIN)/python -m pytest -m "gpu" tests/gpu $(ARGS)

# The tests of products, attention, decoding, cache, sampler and quantization as on another card than the GPU at hand:
# `CARD=3090` has that card's multiprocessors and shared memory (tests/support/cards.py), `CARD=sm_80` the kernels of
# that architecture. Loading, validation, memory and several GPUs do not depend on either.
CARD_TESTS := $(patsubst %,tests/gpu/test_%.py,packed lay_out chains tuning refused_launches attend cache elementwise \
    step drafts delta experts sampler sampler_kernels cuda cuda_ops families)
test-cards: $(DEV)
	$(if $(CARD),,$(error say which card, for instance CARD=3090 or CARD=sm_80))
	$(if $(filter sm_%,$(CARD)),EXL2FLOW_VIRTUAL_ARCH=$(CARD:sm_%=%),EXL2FLOW_TEST_CARD=$(CARD)) \
	    $(BIN)/python -m pytest -m "gpu" $(CARD_TESTS) $(ARGS)

# One small test of each kernel: accesses out of bounds, races in shared memory, misused barriers.
# Kernels of torch and cuBLAS are left out: they take most of the time. So is, for racecheck, the one whose warps meet in
# pairs: behind pairs that met unequally often it does not know the CTA's next barrier (docs/concepts/gpu.md).
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20 \
    $(foreach name,at6native cutlass gemm nvjet cublas cub,--kernel-name-exclude kns=$(name))
sanitize: $(DEV)
	for tool in memcheck "racecheck --kernel-name-exclude kns=ELi4ELi2EEv4Call" "synccheck --num-cuda-barriers 262144"; do \
	    $(SANITIZER) --tool $$tool \
	        $(BIN)/python -m pytest -q -m "gpu" @tests/gpu/sanitized.txt $(ARGS) || exit; \
	done

test-lowest: .venv-lowest/.installed
	$(PYTEST:$(BIN)%=$(LOWEST)%) -m "not slow and not gpu and not multigpu and not network" \
	    tests/unit tests/property tests/golden $(ARGS)
	rm -rf demo-lowest .venv-lowest/work
	PREFECT_HOME=$(CURDIR)/.venv-lowest/prefect $(LOWEST)/exl2flow convert demo/model --out demo-lowest --work-root .venv-lowest/work \
	    --bpw 4.0 --rows 16 --row-tokens 512 --measure-rows 16 --measure-row-tokens 512 \
	    --validate-rows 16 --validate-row-tokens 512 --validate-text demo/heldout.txt

# All campaigns in turn, SECONDS together; each goes on with its state in campaigns/state/. SEED is that of new states.
campaign: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python campaigns/campaign.py --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1) $(ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs core kernels model quant engine inference pipeline tasks flows cli compat serve
	$(BIN)/mypy

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: dev
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf .venv .venv-lowest build dist *.egg-info demo-*/ .exl2flow
