# One verb each; every verb does the set-up it needs (scripts/setup: what is done already is skipped).
PY := .venv/bin/python
ARGS ?=

help:           ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup:          ## Debian packages, .venv, Python packages, native core, the kvstore command
	@scripts/setup

demo:           ## a 12-node cluster on a real trace, two nodes killed, every byte checked; an engine cold and warm (ENGINE=no: without)
	@scripts/setup run
	@.venv/bin/kvstore demo $(if $(filter no,$(ENGINE)),--no-engine) $(ARGS)

test: setup     ## all tests; SIZE=full runs the long ones too; ARGS goes to pytest
	@scripts/test $(ARGS)

sanitize: setup ## the native core under ASan with UBSan and under TSan: the store, the window directory, RDMA in a guest (an hour)
	@SIZE=full $(PY) -m pytest tests/test_store_sanitized.py tests/test_directory_sanitized.py tests/test_verbs_sanitized.py $(ARGS)

check: setup    ## style, types, warnings as errors, generated files
	@scripts/check

format: setup   ## writes the sources in the house format
	@.venv/bin/ruff format kvstore benchmarks tests scripts && .venv/bin/ruff check --fix .

bench: setup    ## measures what docs/PERFORMANCE.md promises, writes bench-results.json; ARGS='--only ID --smoke'
	@scripts/build-raw
	@$(PY) -m benchmarks $(ARGS)

wheel: setup    ## a wheel in wheelhouse/ that needs no compiler, tried in an empty environment
	@scripts/build-wheel

.PHONY: help setup demo test sanitize check format bench wheel
.DEFAULT_GOAL := help
