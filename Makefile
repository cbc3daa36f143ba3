# Set-up and the main jobs. Needs GNU make, a Python of 3.10 to 3.13 with venv, and pip's package index.
#
#   make certify [IMPL=reference] [PROFILE=A,B] [CERTIFICATE=build/certificate.json] [REPORT=build/report.html]
#   make demo [ITERATIONS=16] [SEED=0] [PEAK=gpu]
#   make test
#   make gpu-tests
#
# PYTHON=... chooses the interpreter of .venv; EXTRAS=... what is installed (default: reference,dev on 3.11, else dev).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

IMPL ?= reference
# What is asked for unless told otherwise: all that the reference has rules for, what SkyRL and verl are driven in, and
# the lifecycle of any other.
TORCHLESS_reference := lifecycle,handoff,adapter-sync,group,engine
TORCHLESS_skyrl := adapter-sync
PROFILES_reference := $(TORCHLESS_reference),sync-payload,frozen-offload,live
PROFILES_skyrl := $(TORCHLESS_skyrl),frozen-offload
PROFILES_verl := adapter-sync,sync-payload
PROFILE ?= $(or $(PROFILES_$(IMPL)),lifecycle)

CERTIFICATE ?= build/certificate.json
REPORT ?= build/report.html
EVIDENCE ?= build/evidence
PYTEST_ARGS ?=
DEMO ?= build/demo
ITERATIONS ?= 16
SEED ?= 0
PEAK ?= gpu

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
MILES_VERSION := 0.0.2
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/colocert
MILES := $(CACHE)/miles-rl-$(MILES_VERSION)
SKYRL_VERSION := 0.4.0
SKYRL := $(CACHE)/skyrl-$(SKYRL_VERSION)
VERL_VERSION := 0.9.1
VERL := $(CACHE)/verl-$(VERL_VERSION)
AREAL_VERSION := 1.0.4
AREAL := $(CACHE)/areal-$(AREAL_VERSION)

# A shim that names a version it does not have fails to run, so each candidate is started once.
find_python = for p in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.10; do \
	if command -v "$$p" >/dev/null && "$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	then echo "$$p"; exit 0; fi; done; \
	echo 'make: needs Python 3.10 to 3.13 with venv on PATH, or PYTHON=/path/to/python' >&2; exit 1

.PHONY: help certified-page setup fetch-miles fetch-skyrl fetch-verl fetch-areal certify demo test gpu-tests gpu-mutants bench lint typing docs clean distclean

help:
	@echo 'make certify [IMPL=reference|miles|skyrl|verl|areal|pkg|file.py] [CERTIFICATE=FILE] [REPORT=FILE]   set up, then certify'
	echo 'make demo      set up, then a trainer and an engine that share one device and learn; written to $(DEMO)'
	echo 'make test      set up, then the tests of this project'
	echo 'make gpu-tests     set up, then the rows of gpu_tests on the stand-in driver; gpu-mutants: each red with its faults'
	echo 'make bench     set up, then every bench, each beside its peers; build/bench.md and a plot each in build/bench/'
	echo 'make lint | typing | docs'
	echo 'make clean     remove build/ and caches; distclean also removes $(VENV)'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python="$$($(find_python))"
	"$$python" -m venv $(VENV)
	series="$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
	extras="$(EXTRAS)"
	if [ -z "$$extras" ]; then
		if [ "$$series" = 3.11 ]; then extras=reference,dev; else extras=dev; fi
	fi
	echo "installing colocert[$$extras] into $(VENV) (Python $$series)"
	if ! $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$$extras]" -c constraints.txt; then
		case "$$extras" in *reference*) ;; *) exit 1;; esac
		echo 'make: the extra "reference" (torch, megatron-core, ray) cannot be installed here: kit only' >&2
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	elif [[ "$$extras" != *reference* ]]; then
		echo "make: kit only: the pins of the extra \"reference\" are for Python 3.11 (here: $$series)" >&2
	fi
	touch $@

# The wheel of a published framework is unpacked outside the checkout; nothing of it is imported from there before
# the adapter asks for it.
define fetch
	@mkdir -p '$(CACHE)'
	new="$$(mktemp -d '$(CACHE)/wheel.XXXXXX')"
	trap 'rm -rf "$$new"' EXIT
	echo 'fetching $(1) into $(2)'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: $(3) -d "$$new/wheel" $(1)
	$(BIN)/python -m zipfile -e "$$new"/wheel/*.whl "$$new/tree"
	touch "$$new/tree/.unpacked"
	rm -rf '$(2)'
	mv "$$new/tree" '$(2)'
endef

$(MILES)/.unpacked: | $(STAMP)
	$(call fetch,miles-rl==$(MILES_VERSION),$(MILES))

# Its metadata asks for Python 3.12; the modules that are driven import on 3.11 too.
$(SKYRL)/.unpacked: | $(STAMP)
	$(call fetch,skyrl==$(SKYRL_VERSION),$(SKYRL),--python-version 3.12)

fetch-skyrl: $(SKYRL)/.unpacked

fetch-miles: $(MILES)/.unpacked

$(VERL)/.unpacked: | $(STAMP)
	$(call fetch,verl==$(VERL_VERSION),$(VERL))

fetch-verl: $(VERL)/.unpacked

$(AREAL)/.unpacked: | $(STAMP)
	$(call fetch,areal==$(AREAL_VERSION),$(AREAL))

fetch-areal: $(AREAL)/.unpacked

WHEEL_miles := $(MILES)/.unpacked
WHEEL_skyrl := $(SKYRL)/.unpacked
WHEEL_verl := $(VERL)/.unpacked
WHEEL_areal := $(AREAL)/.unpacked

certify: $(STAMP) $(WHEEL_$(IMPL))
	@mkdir -p '$(dir $(CERTIFICATE))' '$(dir $(REPORT))' build
	$(if $(filter miles,$(IMPL)),export COLOCERT_MILES_PATH='$(MILES)')
	$(if $(filter skyrl,$(IMPL)),export COLOCERT_SKYRL_PATH='$(SKYRL)')
	$(if $(filter verl,$(IMPL)),export COLOCERT_VERL_PATH='$(VERL)')
	$(if $(filter areal,$(IMPL)),export COLOCERT_AREAL_PATH='$(AREAL)')
	# Without torch what needs tensors is not claimed, and asking for it would be incomplete.
	profile='$(PROFILE)'
	if [ '$(origin PROFILE)' = file ] && [ -n '$(TORCHLESS_$(IMPL))' ] && ! $(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'; then
		profile='$(TORCHLESS_$(IMPL))'
	fi
	$(BIN)/python -m pytest conformance --impl='$(IMPL)' --profile="$$profile" -n 2 \
		--certificate='$(CERTIFICATE)' --report='$(REPORT)' --evidence='$(EVIDENCE)' $(PYTEST_ARGS)

# The reference pair on the stand-in device, about a minute on two cores. PNG where something that converts SVG is there.
demo: $(STAMP)
	@rm -rf '$(DEMO)'
	mkdir -p '$(DEMO)'
	$(BIN)/python -m colocert_reference --device host --peak-device '$(PEAK)' --iterations '$(ITERATIONS)' --seed '$(SEED)' \
		--timeline '$(DEMO)/timeline.svg' --reward '$(DEMO)/reward.svg' --trace '$(DEMO)/trace.jsonl' \
		--transcript '$(DEMO)/transcript.txt'
	$(BIN)/python -m colocert_reference.svg_to_png '$(DEMO)'/*.svg

# The tests of the adapters need the wheels; all but SkyRL's need the extra `reference` as well, to be driven.
test: $(STAMP)
	@if [ ! -e '$(SKYRL)/.unpacked' ]; then
		$(MAKE) --no-print-directory fetch-skyrl || echo 'make: skyrl $(SKYRL_VERSION) cannot be fetched: its tests are skipped' >&2
	fi
	if $(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'; then
		$(MAKE) --no-print-directory -k fetch-miles fetch-verl fetch-areal || echo 'make: a wheel cannot be fetched: its tests are skipped' >&2
	fi
	rc=0
	$(BIN)/python -m pytest tests -n 2 -m 'not slow' $(PYTEST_ARGS) || rc=$$?
	if [ $$rc -ne 0 ] && [ $$rc -ne 5 ]; then exit $$rc; fi
	fast=$$rc; rc=0
	$(BIN)/python -m pytest tests -n 2 -m slow $(PYTEST_ARGS) || rc=$$?
	if [ $$rc -eq 5 ] && [ $$fast -eq 0 ]; then rc=0; fi
	exit $$rc

# Required, so a row that is skipped, deleted or without a verdict is red. World 4: G15 needs four ranks here.
gpu-tests: $(STAMP)
	@$(BIN)/python -m pytest gpu_tests --device=host --require-world=4 -n 2 $(PYTEST_ARGS)
	$(BIN)/python -m gpu_tests.report check "$${COLOCERT_REPORT_DIR:-build/gpu}/host-w4.json" --kind host --world 4

gpu-mutants: $(STAMP)
	@$(BIN)/python -m pytest gpu_tests/mutants -n 2 $(PYTEST_ARGS)

lint: $(STAMP)
	@$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

typing: $(STAMP)
	@$(BIN)/python -m mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

# docs/certified.md from docs/certified/; `python -m colocert.report.certified RECORD EVIDENCE` brings a record up to date.
certified-page: $(STAMP)
	@$(BIN)/python -m colocert.report.certified

# Every script of bench/ in turn, beside SkyRL's functions where they can be fetched. BENCH_ARGS=--quick tries them out;
# DOCS=--docs puts the figures of this run into docs/performance.md.
bench: $(STAMP)
	@rm -rf build/bench && mkdir -p build/bench
	if [ ! -e '$(SKYRL)/.unpacked' ]; then $(MAKE) --no-print-directory fetch-skyrl || true; fi
	if [ -e '$(SKYRL)/.unpacked' ]; then export COLOCERT_SKYRL_PATH="$${COLOCERT_SKYRL_PATH:-$(SKYRL)}"; fi
	failed=0
	for script in bench/[a-z]*.py; do
		name="$$(basename "$$script" .py)"
		echo "== $$name"
		$(BIN)/python "$$script" --json "build/bench/$$name.json" $(BENCH_ARGS) || failed=1
	done
	$(BIN)/python bench/_report.py build/bench $(DOCS)
	exit $$failed

clean:
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .tox
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
