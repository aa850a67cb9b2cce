# Two commands do all the set-up: `make train` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
GPU    ?= cuda
BUDGET ?= 570
BIN    := $(VENV)/bin

# Where torch comes from: pypi, or an index of PyTorch such as cu126, cu130, rocm7.2 or cpu, to fit
# the driver of the GPUs (docs/gpu.md). Another one replaces the torch that is there.
TORCH_INDEX ?= pypi
TORCH := $(if $(filter-out pypi,$(TORCH_INDEX)),$(VENV)/.torch-$(TORCH_INDEX))

.PHONY: train test test-all faults system-packages docs gpu lint types format clean help
.DELETE_ON_ERROR:

help:
	@echo "make train   environment, real data into HDF5 shards, a tracked training run"
	@echo "make test    everything that the tests need, a SLURM cluster included, then the tests"
	@echo "make test-all   the slow tests too: soak tests, Hydra's pre-releases"
	@echo "make faults  kills and other faults at random moments of real runs (docs/faults.md)"
	@echo "make docs    the documentation as a web site, in site/"
	@echo "make gpu     what one GPU can show: a table of results within minutes (docs/gpu.md)"
	@echo "make lint | types | format | clean"
	@echo "make TORCH_INDEX=cu126 train   with a torch for another driver or for AMD (docs/gpu.md)"

train: $(VENV)/.sample data/digits/index.json
	@$(BIN)/python -m hpctrain experiment=digits

data/digits/index.json: | $(VENV)/.sample
	@$(BIN)/python -m data_prep sample digits data/digits

# pip and apt work on one core each, so they work at the same time.
test:
	@$(MAKE) --no-print-directory -j 2 system-packages $(VENV)/.test
	@tests/run.sh $(BIN)

test-all:
	@HPCTRAIN_TESTS=all $(MAKE) --no-print-directory -j 2 system-packages $(VENV)/.slow-libraries
	@HPCTRAIN_TESTS=all tests/run.sh $(BIN)

# KILLS=300 SEED=7: so many random kills beside each event; CLUSTER=1: those of a Slurm cluster, too.
KILLS ?= 20
SEED  ?= 0
faults: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --kills $(KILLS) --seed $(SEED) \
		$(if $(CLUSTER),--cluster)

system-packages:
	@tests/system_packages.sh

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean
	@echo "open site/index.html, or: $(BIN)/python -m mkdocs serve"

# It needs no Slurm. GPU=cpu rehearses on a CPU what can be rehearsed there. It begins no part that
# would not end within BUDGET seconds; the next call makes those that have not passed.
gpu: $(VENV)/.test
	@$(BIN)/python -m tests.gpu.first_minutes --device $(GPU) --budget $(BUDGET) --resume

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v shellcheck >/dev/null; then \
		shellcheck .ci/run tests/*.sh hpctrain/cluster/slurm/*.sh hpctrain/addons/node/*.sh slurm/*.sbatch; \
	else echo "*** shellcheck is not installed: the shell files are NOT checked"; fi

types: $(VENV)/.test
	$(BIN)/mypy -p hpctrain -p data_prep
	MYPYPATH=slurm $(BIN)/mypy slurm/dev-cluster slurm/dev_cluster

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site data/digits .mypy_cache .ruff_cache .pytest_cache

# The pip that comes with Python may be years old, and then takes three times as long to resolve the
# requirements. pip resolves all of them in one call, so torch's upper bound also holds for the
# packages that depend on torch. pip compiles the packages on one core, which takes as long as
# everything else; compileall uses several. It leaves out what hardly anybody imports: tests of the
# packages, models of transformers, and some libraries of libraries, which are compiled when they
# are needed. Some packages have templates that do not compile; pip ignores them, too.
SELDOM := databricks|fontTools|lightning|mypyc?|pip|pygments/lexers|pytorch_lightning|setuptools
SELDOM := site-packages/(.*/tests?|$(SELDOM)|torchmetrics|transformers/models)/
$(VENV)/.%: pyproject.toml | $(VENV)/bin/python $(TORCH)
	@$(if $(TORCH)$(wildcard $(VENV)/.torch-*),,$(BIN)/python -m hpctrain.base.processes.gpu_driver $(TORCH_INDEX))
	@echo "installing hpctrain[$*] into $(VENV) (the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[$*]'
	@if [ $* = test ]; then $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-compile --no-deps --group libraries; fi
	@$(BIN)/python -m compileall -qq -j 4 -x '$(SELDOM)' $(VENV)/lib || true
	@touch $@

# pip keeps a torch that is there, so it comes first, and the others leave it alone.
$(VENV)/.torch-$(TORCH_INDEX): | $(VENV)/bin/python
	@$(BIN)/python -m hpctrain.base.processes.gpu_driver $(TORCH_INDEX)
	@echo "installing torch from download.pytorch.org/whl/$(TORCH_INDEX) into $(VENV)"
	@$(BIN)/python -m pip uninstall --quiet --yes torch triton triton-rocm 2>/dev/null
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--index-url https://download.pytorch.org/whl/$(TORCH_INDEX) \
		"$$(sed -n 's/^ *"\(torch>=[^"]*\)",$$/\1/p' pyproject.toml)"
	@$(BIN)/python -c 'import torch; version = torch.__version__; \
		version.endswith("+$(TORCH_INDEX)") or exit(f"this is torch {version}, not $(TORCH_INDEX)")'
	@rm -f $(VENV)/.torch-* && touch $@

$(VENV)/.slow-libraries: $(VENV)/.test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --group slow-libraries
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[wandb]'
	@touch $@

.PRECIOUS: $(VENV)/.%

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make environments: apt-get install python3-venv"; exit 1; }
