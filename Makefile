# `make help` lists the targets. Each makes its own virtual environment when there is none.
#
#   PYTHON  the Python (3.11 or newer) that the environment is made from
#   VENV    where the environment is; empty: install nothing and use PYTHON as it is, for a machine whose Python
#           already has torch with CUDA and numba-cuda, and perhaps no network:  make VENV= PYTHON=python3 test-gpu
#   WORKERS processes that share the tests; most of the time of the GPU tests, too, goes into compiling
#   MARKS   which tests `make test` runs, as pytest's -m has it
#   SEED, FIRST, COUNT  which problems `make fuzz` draws
#   RECORD, ONLY  of `make same-code`: anything, to record anew; parts of the names of kernels
#   CUDA    the CUDA libraries that numba-cuda gets: cu13, or cu12 for a torch built for CUDA 12
PYTHON ?= python3
VENV ?= .venv
CUDA ?= cu13
WORKERS ?= auto
MARKS ?= not thorough
SEED ?= 0
FIRST ?= 0
COUNT ?= 20000

ifneq ($(strip $(VENV)),)
PY := $(VENV)/bin/python
RUN_ENV := $(VENV)/.installed-$(CUDA)
TEST_ENV := $(VENV)/.installed-$(CUDA)-test
DOCS_ENV := $(VENV)/.installed-$(CUDA)-docs
LAB_ENV := $(VENV)/.installed-$(CUDA)-lab
LINT_ENV := $(VENV)/.installed-lint
else
PY := $(PYTHON)
endif

# The pinned CUDA packages are those of CUDA 13; for CUDA 12, numba-cuda's own bounds decide.
CONSTRAINTS := $(if $(filter cu13,$(CUDA)),constraints.txt,$(VENV)/constraints-$(CUDA).txt)
# Python compiles what it imports when it first does, which is quicker than compiling all of torch while installing;
# but then it must be allowed to keep the result.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(PY) -m pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
REQUIRE_GPU = @$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "$@: torch sees no CUDA GPU")'

# The modules of the API reference.
DOCUMENTED := numba_tconv $(addprefix numba_tconv.,lab.explain.explanation formula.problem formula.taps lab.measure.workloads lab.measure.rows lab.report.figures kernels.rung runtime.device)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu same-code fuzz bench figures docs notebooks lab lint clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(RUN_ENV) ## see it compute: live with an NVIDIA GPU, in the CUDA simulator without one
	$(PY) -m numba_tconv demo

# The simulator's tests run even if others failed.
# In the order of their names: by the number of their tests, files of few long tests would come last, and one process wait.
test: $(TEST_ENV) ## tests of every part; those that need a GPU are skipped where there is none
	@failed=0; set -x; \
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/simulator -m "$(MARKS)" \
		|| failed=1; \
	NUMBA_ENABLE_CUDASIM=1 $(PY) -m pytest -n $(WORKERS) tests/simulator -m "$(MARKS)" || failed=1; \
	exit $$failed

test-all: MARKS = thorough or not thorough
test-all: test ## the same, and more configurations of kernels and random examples, some ten minutes longer on two processors

# The longest tests take a minute, and most of that goes into compiling: a process that has none left takes another's.
test-gpu: $(TEST_ENV) ## the tests that need a GPU; fails where there is none
	$(REQUIRE_GPU)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m gpu --ignore=tests/simulator --ignore=tests/test_notebooks.py

# No GPU is needed: kernels are compiled for the GPUs that the list names.
same-code: $(TEST_ENV) ## compare the machine code of a list of kernels with tests/same_code.json; RECORD=1 keeps it
	$(PY) -m tests.same_code $(if $(RECORD),--record) $(ONLY)

fuzz: $(RUN_ENV) ## random problems against float64 until COUNT of SEED are done, from number FIRST on
	$(PY) -m numba_tconv fuzz --seed $(SEED) --first $(FIRST) --count $(COUNT)

# What cannot be compiled ahead, as with the cache turned off, is compiled by the measurement itself. The decoders need
# transformers, which a Python that is used as it is may lack.
bench: $(TEST_ENV) ## measure on this GPU and add the rows to plots/data
	$(REQUIRE_GPU)
	-$(PY) -m numba_tconv compile --rung all --precision ieee
	-$(PY) -m numba_tconv compile --rung all --precision ieee --direction step
	$(PY) -m numba_tconv bench
	$(PY) -m numba_tconv bench --weights frozen --rung auto
	$(PY) -m numba_tconv bench --direction grad_input
	$(PY) -m numba_tconv bench --direction grad_weight
	$(PY) -m numba_tconv bench --direction step
	$(PY) -m numba_tconv sweep --precision tf32
	$(PY) -m numba_tconv sweep --dtype bfloat16
	$(PY) -m numba_tconv sweep --factor 4
	$(PY) -m numba_tconv kernelbench
	$(PY) -m numba_tconv activations
	-$(PY) -m numba_tconv decoders
	-$(PY) -m numba_tconv decoders --mode eager --mode graph

figures: $(RUN_ENV) ## draw the figures, and fill the tables of README and plots/README, from the rows in plots/data
	$(PY) -m numba_tconv figures

docs: $(DOCS_ENV) ## the API reference, in build/docs; fails where one of its links is broken
	rm -rf build/docs
	$(PY) -m pdoc --docformat google --output-directory build/docs $(DOCUMENTED)
	$(PY) -m tests.links build/docs

# Without a GPU the outputs that one recorded stay, and nothing is measured, so several run at a time.
notebooks: $(TEST_ENV) ## run the notebooks again, and keep their outputs where there is a GPU
	printf '%s\n' notebooks/*.ipynb | PYTHONPATH='$(CURDIR)' TQDM_DISABLE=1 xargs -n 1 \
		$$($(PY) -c 'import os, torch; print("-P", 1 if torch.cuda.is_available() else os.cpu_count())') \
		$(PY) -m jupyter execute $$($(PY) -c 'import torch; print("--inplace" * torch.cuda.is_available())')

lab: $(LAB_ENV) ## open the notebooks in JupyterLab
	$(PY) -m jupyter lab notebooks

lint: $(LINT_ENV) ## ruff: lint and format, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean: ## remove .venv and the caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(strip $(VENV)),)
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints-$(CUDA).txt: constraints.txt | $(PY)
	grep -vE '^(cuda|nvidia)-' $< > $@

$(RUN_ENV): pyproject.toml $(CONSTRAINTS) | $(PY)
	$(INSTALL) -e '.[$(CUDA)]'
	@touch $@

$(TEST_ENV): pyproject.toml $(CONSTRAINTS) | $(PY)
	$(INSTALL) -e '.[$(CUDA),test]'
	@touch $(RUN_ENV) $@

$(DOCS_ENV): pyproject.toml $(CONSTRAINTS) | $(PY)
	$(INSTALL) -e '.[$(CUDA),docs]'
	@touch $(RUN_ENV) $@

$(LAB_ENV): pyproject.toml $(CONSTRAINTS) | $(PY)
	$(INSTALL) -e '.[$(CUDA),notebooks]'
	@touch $(RUN_ENV) $@

$(LINT_ENV): constraints.txt | $(PY)
	$(INSTALL) ruff
	@touch $@
endif
