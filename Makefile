# `make demo` and `make test` need only make and Python 3.10 or newer: they set up .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The exact torch first: the bare requirement would bring the newest build for GPUs.
TORCH  := torch==2.13.0

# One thread for BLAS: the tests run in parallel by themselves, and timings compare.
export OMP_NUM_THREADS = 1
export OPENBLAS_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
# Tests start many processes, which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo quick test slow share versions lint lines docs release bench gpu clean

help:
	@echo "make demo   install, then compile and check one kernel: flashgen run specs/causal.py"
	@echo "make quick  ruff, mypy, generated/ and the tests of the changed folders (under a minute)"
	@echo "make test   install, then the tests (10 minutes on 2 cores)"
	@echo "make slow   all tests of the slow tier (hours)"
	@echo "make share  the sixth of the slow tier that .ci/run takes for the next commit"
	@echo "make versions  compile every spec with each supported release of NVRTC"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation site, in build/site"
	@echo "make release  build the wheel and the sdist, and install them for each Python that they name"
	@echo "make bench  the benchmarks"
	@echo "make lines  lines of code by folder"
	@echo "make gpu    on a GPU: check, measure and record all; PART=dry runs it without one"
	@echo "make clean  remove .venv and caches of tools"

# ---- set-up: one stamp per set of packages, made again when pyproject.toml changes --------------

$(VENV)/base.stamp: pyproject.toml
	@echo "setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(PIP) install "$(TORCH)"
	@echo "installing flashgen and what it needs"
	@$(PIP) install -e ".[cuda]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	@echo "installing the tools and the example model for the tests"
	@$(PIP) install -e ".[dev,examples]"
	@touch $@

# ---- what they are for ------------------------------------------------------------------------

demo: $(VENV)/base.stamp
	$(BIN)/flashgen run specs/causal.py

PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal --durations 25

# mypy takes a minute without its cache. No test begins after 24 seconds; those left out are counted.
quick: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/flashgen emit --check
	$(PYTEST) --failed-first --minutes 0.4 $$($(BIN)/python -m tests.support.changed)

test: $(VENV)/dev.stamp
	$(PYTEST)

slow: $(VENV)/dev.stamp
	$(PYTEST) -m slow --timeout 3600

# A sixth of the slow tier for each commit, so that six commits in a row run all of it. .ci/run gives
# the number of commits on HEAD; without it, the number of the next commit is taken. A share takes
# about 45 minutes on 2 cores. Until each of the six has been seen whole, no test starts after 8
# minutes; the last line says how many tests were left out.
COMMIT ?= $(shell expr $$(git rev-list --count HEAD) + 1)

share: $(VENV)/dev.stamp
	$(PYTEST) -m slow --timeout 900 --share-of-commit $(COMMIT) --minutes 8

# Each release of NVRTC has a virtual environment of its own, without torch.
NVRTC := 12.8 12.9 13.0
NVRTC_PACKAGE = nvidia-cuda-nvrtc$(if $(filter 12.%,$*),-cu12)
CORE := filelock jinja2 numpy rich sympy typer nvidia-cuda-nvdisasm

$(VENV)/nvrtc-%/stamp:
	@$(PYTHON) -m venv $(@D)
	@echo "installing NVRTC $* in $(@D)"
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install $(CORE) \
		"cuda-python==$*.*" "$(NVRTC_PACKAGE)==$*.*"
	@touch $@

# The forms of wide heads, with and without a score function and learned tensors.
WIDE := $(addprefix specs/,causal.py document.py softcap.py sink.py packed_causal.py t5_bias.py)

.PRECIOUS: $(VENV)/nvrtc-%/stamp
.PHONY: $(NVRTC:%=nvrtc-%)
$(NVRTC:%=nvrtc-%): nvrtc-%: $(VENV)/nvrtc-%/stamp
	$(<D)/bin/python benchmarks/compile_all.py
	$(<D)/bin/python benchmarks/compile_all.py --head-dim 512 $(WIDE)
	$(<D)/bin/python benchmarks/compile_all.py --head-dim 576 --head-dim-v 512 --dropout $(WIDE)

versions: $(NVRTC:%=nvrtc-%)

# mypy looks at the packages as they are on Windows too: names that only POSIX has are errors there.
lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

# With any Python: nothing is imported but its own library.
lines:
	@$(PYTHON) benchmarks/lines.py

# A warning, such as a broken link, fails the build.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tools of a release have an environment of their own; build makes a further one for hatchling, and
# the wheel from the source distribution.
RELEASE := $(VENV)/release

$(RELEASE)/stamp:
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip --disable-pip-version-check --quiet install "build>=1.2" "twine>=6.1"
	@touch $@

release: $(RELEASE)/stamp $(VENV)/base.stamp
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(BIN)/python -m tests.support.release dist "$(TORCH)" $(if $(PARTIAL),--partial)

# gpu.py, compile_all.py and lines.py have targets of their own; the other three do not measure.
OTHERS := $(addprefix benchmarks/,gpu.py compile_all.py lines.py peers.py report.py __init__.py)

bench: $(VENV)/dev.stamp
	for file in $(filter-out $(OTHERS),$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# In the Python at hand, with a torch for the GPU: nothing is installed. Where PYTHON is not given,
# a .venv that is there is taken, which is enough for PART=dry.
GPU_PYTHON := $(PYTHON)
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
endif

gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(OUT),--out $(OUT)) $(if $(WORK),--work $(WORK))

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
