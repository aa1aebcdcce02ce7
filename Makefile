# The two commands of the README are `make demo` and `make test`; everything they need, they set up.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

KERAS_VENV := .venv-keras
KERAS_STAMP := $(KERAS_VENV)/.installed

FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed

DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

PACKAGE_VENV := .venv-package
PACKAGE_STAMP := $(PACKAGE_VENV)/.installed

# Python keeps what it has compiled whatever the environment says: tests start thousands of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick test-long test-network test-slurm test-kubernetes test-ray test-gpu bench-gpu test-keras test-frameworks bench-quick check format lint types docs package clean

demo: $(STAMP)
	$(BIN)/offbeat compare --model mlp --data digits --workers 4 --strategy bsp --strategy partial --slow none --slow 1:5

# Tests whose result depends on their input alone: decisions, numbers, formats, the simulator.
PURE := $(addprefix tests/,data numerics policies scenarios simulator wire test_actions.py test_docs.py test_tidy.py)
PYTEST := $(BIN)/python -m pytest --dist worksteal
RERUNS :=

test: test-quick
	$(PYTEST) --numprocesses 4 -m 'not long' $(RERUNS) $(PURE:%=--ignore=%)

test-quick: $(STAMP)
	$(PYTEST) --numprocesses 2 -m 'not long' $(PURE)

test-long: $(STAMP)
	$(PYTEST) --numprocesses 3 -m long $(RERUNS)

# As root. Jobs mostly wait, so several run at a time; those that keep all cores busy run alone.
NETWORK_TESTS := OFFBEAT_TEST_NETWORK=1 $(BIN)/python -m pytest tests/test_network.py tests/test_network_long.py -rA

test-network: $(STAMP)
	$(NETWORK_TESTS) -k 'not busy' --numprocesses 4 --dist worksteal
	$(NETWORK_TESTS) -k busy

# As root: a Slurm cluster with several nodes on this machine, for each test its own.
test-slurm: $(STAMP)
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; command -v slurmctld >/dev/null || { echo "make test-slurm needs Slurm: as root, apt-get install slurm-wlm munge (Debian, Ubuntu)" >&2; exit 1; }
	OFFBEAT_TEST_SLURM=1 $(BIN)/python -m pytest tests/test_slurm.py -rA

# The manifests in deploy/kubernetes, without a cluster: against schemas, and their containers as processes.
test-kubernetes: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt PyYAML kubernetes-validate
	$(BIN)/python -m pytest tests/test_kubernetes.py -rA

# Ray clusters of several nodes on this machine, for each test its own.
test-ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	OFFBEAT_TEST_RAY=1 $(BIN)/python -m pytest tests/test_ray.py tests/benchmarks/test_bench_ray_chaos.py -rA

# The headline figures of the five systems in some five minutes; `python -m benchmarks list` has the whole.
BENCH := $(BIN)/python -m benchmarks

bench-quick: $(STAMP)
	$(BENCH) straggler --model cnn2 --stragglers 1 --epochs 2 --steps 60 --step-ms 40
	$(BENCH) staleness --model mlp --data digits --strategy bsp --strategy dtssp --setting lasting_dynamic --threads 1 --steps 48 --step-ms 60
	$(BENCH) hybrid-sweep --rate-mbit 1000 --workers 4
	$(BENCH) validate --data digits --compute timed --load memory --side numpy --side overlap --threads 1 --epochs 5 --samples 1000 --held-out 500
	$(BENCH) failover --kills 4

# On a machine with a CUDA GPU and a torch that knows it; elsewhere they do nothing.
HAS_GPU = $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"

test-gpu: $(STAMP)
	@if $(HAS_GPU); then OFFBEAT_TEST_GPU=1 $(BIN)/python -m pytest tests/test_gpu.py; \
	else echo "torch finds no CUDA GPU here: nothing to test"; fi

bench-gpu: $(STAMP)
	@if $(HAS_GPU); then $(BENCH) gpu --json benchmarks/results/gpu.json && \
	$(BENCH) gpu --workers 4 --json benchmarks/results/gpu_4_workers.json && \
	$(BENCH) gpu --workers 4 --rate-mbit 1000 --rate-mbit 10000 --rate-mbit 25000 --json benchmarks/results/gpu_lines.json && \
	$(BENCH) nimble --json benchmarks/results/nimble.json && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gpu]' && \
	$(BENCH) validate-gpu --data digits --load repeated --gigabytes 0.004 --json benchmarks/results/validate_gpu.json; \
	else echo "torch finds no CUDA GPU here: nothing to measure"; fi

test-keras: $(KERAS_STAMP)
	KERAS_BACKEND=torch $(KERAS_VENV)/bin/python -m pytest tests/test_keras.py
	KERAS_BACKEND=tensorflow $(KERAS_VENV)/bin/python -m pytest tests/test_keras.py

test-frameworks: $(FRAMEWORKS_STAMP)
	$(FRAMEWORKS_VENV)/bin/python -m pytest tests/test_lightning.py tests/test_transformers.py tests/test_accelerate.py

# The site, in build/docs. Every warning is an error.
docs: $(DOCS_STAMP)
	rm -rf build/docs
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet --doctree-dir build/doctrees docs build/docs
	@echo build/docs/index.html

# Wheel and source distribution, in dist/; then tests of the unpacked source run with the installed wheel.
PACKAGE_TESTS := package docs tidy scenarios codec log_file replay range_clock clock_gate throughput_gate lockstep partial_groups hash_ring schedules classifier aggregating_servers
UNPACKED := build/package

package: $(PACKAGE_STAMP)
	rm -rf dist $(UNPACKED)
	$(PACKAGE_VENV)/bin/python -m build
	$(PACKAGE_VENV)/bin/python -m twine check --strict dist/*
	mkdir -p $(UNPACKED)
	tar --extract --gzip --file dist/offbeat-*.tar.gz --strip-components 1 --directory $(UNPACKED)
	python3 -m venv $(UNPACKED)/.venv
	$(UNPACKED)/.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[demo]" pytest hypothesis
	cd $(UNPACKED) && OFFBEAT_TEST_PACKAGE=$(CURDIR)/dist .venv/bin/python -m pytest $$(find tests -false $(PACKAGE_TESTS:%=-o -name test_%.py))

check: format lint types test

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

$(KERAS_STAMP): pyproject.toml constraints.txt
	python3 -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[keras,demo]' pytest tensorflow-cpu
	touch $@

$(FRAMEWORKS_STAMP): pyproject.toml constraints.txt
	python3 -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lightning,transformers,accelerate,dev]'
	touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt
	python3 -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

$(PACKAGE_STAMP): pyproject.toml constraints.txt
	python3 -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	touch $@

clean:
	rm -rf $(VENV) $(KERAS_VENV) $(DOCS_VENV) $(PACKAGE_VENV) build dist
