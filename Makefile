PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
# cpu, or cuda: a build for NVIDIA GPUs, of several gigabytes.
TORCH ?= cpu
VENV := .venv
BIN := $(VENV)/bin
# pip compiles one file at a time; the files that are no Python of this release are not worth a word.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Where torch for CPUs is, where pip was not told where to look by its own configuration.
SOURCES = $(shell $(BIN)/python serve/doctor/before.py --torch $(TORCH) --pip-flags)
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null 2>&1 || true

# These take a model or an environment of their own, or many minutes.
LARGE := $(addprefix benchmarks/,compress_minilm.py compress_peers.py compress_fashion_mnist.py quantization_methods.py \
  embeddings.py embeddings_overload.py serving_peers.py serving_networks.py gpu_common.py gpu_resnet50.py gpu_minilm.py perf_analyzer.py \
  rollout_simulation.py load_server.py load_peers.py load_truth.py plan_truth.py train_common.py train_speed.py train_recovery.py \
  compress_large.py fuzz_files.py repair.py tune_training.py int4.py search_on_ray.py quantize_memory.py)

BASE ?= HEAD

# Tests wait much, for processes and clocks: one worker more than there are cores.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n + 1 : 9)))
# Those of tests/e2e and tests/integration, each with a Triton or more beside it.
WAITERS ?= 3

# Python keeps what it has compiled, whatever the shell says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: ready demo check test test-all hunt pipeline deploy-check images images-check workflows-check lint docs docs-serve bench clean

# What is missing is said before anything is downloaded, and how much that will be.
ready:
	@test -e $(BIN)/pip || $(PYTHON) serve/doctor/before.py --torch $(TORCH) --folder $(VENV)
	@for other in $(filter-out $(TORCH),cpu cuda); do if test -e $(VENV)/.torch-$$other; then \
	  echo "$(VENV) has torch for $$other, not for $(TORCH): rm -r $(VENV) first" >&2; exit 2; fi; done

$(BIN)/pip: | ready
	$(PYTHON) -m venv $(VENV)
	touch $(VENV)/.torch-$(TORCH)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) $(SOURCES) -e '.[all]'
	$(BIN)/serve triton install
	$(COMPILE)
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) $(SOURCES) -e '.[all,dev]'
	$(BIN)/serve triton install
	$(COMPILE)
	touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	-$(BIN)/serve doctor
	$(BIN)/python examples/digits/demo.py

# Each worker begins with a part of its own, so that those that compute run beside those that wait, and takes from the
# others' ends: what a file makes for all its tests is made once. Of e2e, the longest file comes first. One file at a time
# has the machine's shared memory to itself. What fails in one part keeps none of the others from being told.
test test-all: $(VENV)/.installed-dev
	@failed=0; export OMP_NUM_THREADS=1; set -x; \
	  $(BIN)/python -m pytest $(SHORT) tests/hostile tests/unit -n $(WORKERS) --dist worksteal || failed=1; \
	  $(BIN)/python -m pytest $(SHORT) tests/e2e tests/integration tests/gpu \
	    --ignore tests/integration/test_triton_process.py -n $(WAITERS) --dist loadfile --no-loadscope-reorder || failed=1; \
	  unset OMP_NUM_THREADS; \
	  $(BIN)/python -m pytest $(SHORT) tests/integration/test_triton_process.py || failed=1; exit $$failed

test: SHORT := --short

# The inner loop: the unit tests of the rooms that differ from BASE. `make test` has the rest.
check: lint
	@tests=$$($(BIN)/python -m tests.affected $(BASE)) || exit 1; \
	  if [ -z "$$tests" ]; then echo "no unit tests are of what has changed"; exit 0; fi; echo "pytest $$tests"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 8 $$tests

# Property tests on examples of their own draw, unlike the gate's, which are the same each time.
hunt: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/hostile -m hypothesis --hypothesis-profile hunt -n logical

pipeline: $(VENV)/.installed
	deploy/pipeline.sh

deploy-check: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit/serve/deploy tests/e2e/test_prometheus.py

# Podman or Docker; PYTHON_IMAGE and DEBIAN_IMAGE name other bases, BUILD_FLAGS what their build needs here.
images: $(VENV)/.installed-dev
	$(BIN)/python -m deploy.containers build

# The pods that `serve deploy render` writes for Podman, run: under load, killed, replaced, watched. Some ten minutes.
images-check: $(VENV)/.installed-dev
	$(BIN)/python -m deploy.containers check

# The steps of .github/workflows, in fresh clones of HEAD, but for what needs GitHub, a registry or a cluster. Some ten minutes.
workflows-check: $(VENV)/.installed-dev
	$(BIN)/python -m deploy.workflows

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# mkdocs reads compress and serve from here, wherever they are installed from. Its theme's word about a successor is known.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs serve --strict --dev-addr 127.0.0.1:8001

bench: $(VENV)/.installed-dev
	for script in $(filter-out $(LARGE),$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
