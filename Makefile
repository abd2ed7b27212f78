# Every target but help and clean sets the environment up first; that takes 0.1 s when it is there.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-places check bench clean

PYTHON := .venv/bin/python
# Where nobody may keep what Python compiles, each of hundreds of processes compiles all anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make setup   create .venv with vLLM for CPUs, kvtide, and the models (once, two to three minutes)'
	@echo 'make demo    show a prefix computed by one engine and used by another'
	@echo 'make check   format, lint, types, tidy and quick tests'
	@echo 'make test    check, then the long tests and those with a real vLLM (longest: scripts/soak)'
	@echo 'make test-places   two real vLLM that share a directory, a server, a bucket, a store'
	@echo 'make bench   the benchmark, less than an hour (of tiers: python -m benchmarks tiers)'
	@echo 'make clean   remove .venv and all caches'

setup:
	@scripts/setup

demo: setup
	@$(PYTHON) examples/demo.py

check: setup
	@scripts/check

test: setup
	@state=0; scripts/check || state=1; scripts/setup_infinistore || state=1; \
	$(PYTHON) -m pytest -n 3 --dist loadfile -m '(long or hypothesis) and not engine and not slow' || state=1; \
	$(PYTHON) -m pytest -m 'engine and not places and not slow' || state=1; exit $$state

test-places: setup
	@scripts/setup_infinistore && $(PYTHON) -m pytest -m 'places and not slow'

bench: setup
	@$(PYTHON) -m benchmarks; code=$$?; $(PYTHON) scripts/make_docs; exit $$code

clean:
	rm -rf .venv .venv-lmcache .venv-infinistore .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
