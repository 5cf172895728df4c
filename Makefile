# The project's tasks. `make` lists them.
.DEFAULT_GOAL := help
python := .venv/bin/python
eslint := tests/web/node_modules/.bin/eslint
tsc := tests/web/node_modules/.bin/tsc
cpp := $(shell git ls-files '*.cpp' '*.cu' '*.h' 2>/dev/null)

.PHONY: help setup test test-all robustness lint format bench figures docs notebooks web wheels ci

help:  ## List these tasks
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:  ## Make .venv with all that the tests need
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[test]'

test:  ## Run the tests of every feature
	$(python) -m pytest

test-all:  ## Run all tests, up to an hour
	$(python) -m pytest -m ""

robustness:  ## Run the stress tests with all their cases, most of an hour
	ROBUSTNESS=full $(python) -m pytest -m "" tests/robustness

lint:  ## Check format, style and types
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run -Werror $(cpp)
	@[ ! -x $(eslint) ] || $(eslint) -c tests/web/eslint.config.mjs web tests/web
	@[ ! -x $(tsc) ] || $(tsc) -p tests/web

format:  ## Format all sources
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(cpp)

bench:  ## Time the parts against PyTorch, as the README shows them
	$(python) gpt.py bench part0,part1,part2,part3,part4,sdpa

figures:  ## Remake the figures and the blocks of output in docs/, some six minutes
	docs/make_figures.sh $(python)

docs:  ## Rewrite docs/use/cli.md, the tables of results and the notebooks' text
	$(python) scripts/make-docs.py
	$(python) scripts/make-notebooks.py

notebooks:  ## Execute the first notebook; scripts/make-notebooks.py --run 2 needs a GPU
	$(python) scripts/make-notebooks.py --run 1

web:  ## Make the page in out/page
	$(python) gpt.py web --build --out out/page

wheels:  ## Write wheels, which need no compiler, and the source distribution to dist
	$(python) scripts/make-wheels.py
	$(python) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

ci:  ## Run the checks that a change must pass, in a fresh clone of the last commit
	bash .ci/run
