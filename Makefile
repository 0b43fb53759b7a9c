# Two commands do all set-up on a machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-all check docs package beside floors kernels release publish clean

demo: $(VENV)/installed
	@echo "the demo takes less than a minute on a CPU, and writes to ./demo"
	$(BIN)/python examples/demo.py

# A few workers, as each loads torch. Each begins with a run of files, and takes from others what is
# left: fixtures of a module are made once, but for those of few.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m 'not slow'

# Also what is slow: storms, every family of models, fuzz in amounts.
test-all: $(VENV)/installed
	@$(BIN)/python tests/support/node_packages.py
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# sdist and wheel, tried in clean environments: EXTRAS='--extra s3', EXTRAS='--extra all'.
package:
	$(PYTHON) tests/try_release.py $(EXTRAS)

# Wheels for each Python, and the table of docs/support.md: what resolves beside each trainer.
# It takes some minutes.
beside:
	$(PYTHON) -m venv .venv-floors
	$(FLOORS)/python -m pip install --quiet uv
	$(FLOORS)/python tests/try_release.py --beside $(FLOORS)/uv

# Version, changelog, build, an upload that is rehearsed, commit and tag: make release
# VERSION=0.2.0. Nothing is pushed. `publish` uploads a tagged commit to PyPI.
release:
	$(PYTHON) .ci/release.py '$(VERSION)'

publish:
	$(PYTHON) .ci/release.py --publish

# torch first and by version: asked for later, as a dependency, pip may choose a CUDA build of
# several gigabytes where a CPU build is at hand.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("packstore needs Python 3.11 or newer: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and packstore into $(VENV): 3 GB with a CPU build of torch, 6 GB with CUDA; this takes some minutes"
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	touch $@

# The suite on the oldest releases that pyproject.toml admits. uv, as pip tries combinations for minutes. Without access to torch's own
# index: make floors CPU_TORCH=, which installs the CUDA build, of several gigabytes.
# First the same releases with nothing else: the packages of the tests bring pandas, for example.
CPU_TORCH = https://download.pytorch.org/whl/cpu
FLOORS = .venv-floors/bin

floors:
	$(PYTHON) -m venv .venv-floors
	$(FLOORS)/python -m pip install --quiet uv
	$(FLOORS)/python tests/try_release.py --oldest --extra train --torch 2.11.0 $(addprefix --torch-index ,$(CPU_TORCH))
	$(FLOORS)/python tests/try_release.py --floors torch train s3 gcs azure | tr ' ' '\n' > .venv-floors/floors.txt
	$(FLOORS)/uv pip install --quiet --python $(FLOORS)/python $(addprefix --index-url ,$(CPU_TORCH)) torch==2.11.0
	$(FLOORS)/uv pip install --quiet --python $(FLOORS)/python -e '.[dev]' -r .venv-floors/floors.txt
	$(FLOORS)/python -m pytest -m 'not slow'

# GPU kernels without a GPU: interpreted, and compiled for three generations. With the newest
# Triton; the range kernels were also compiled with 3.6.0 and 3.7.1, those of torch 2.11 and 2.13.
kernels: $(VENV)/installed
	$(PIP) --group kernels
	$(BIN)/python -m pytest -rP tests/torch/logprobs/test_triton_tiles.py \
		tests/torch/attention/test_copies.py tests/torch/attention/test_range_kernels.py \
		tests/torch/models/test_layer_kernels.py

clean:
	rm -rf $(VENV) .venv-floors demo build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
