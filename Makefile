# `make demo` and `make test` work from a fresh clone: everything is installed into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# A Mac gets MLX's Metal wheel without an extra; Linux machines without a GPU get the CPU one.
# On Linux with an NVIDIA GPU: make demo BACKEND=cuda13
ifeq ($(shell uname -s),Darwin)
BACKEND ?=
else
BACKEND ?= cpu
endif
comma := ,
# ON: torch too, for tests that compare with transformers' models.
ORACLE ?= OFF
EXTRAS := dev$(if $(BACKEND),$(comma)$(BACKEND))$(if $(filter ON,$(ORACLE)),$(comma)oracle)

WERROR ?= OFF
# ON: also what tests/native/test_sanitizers.py runs. Needs GCC's libasan and libubsan.
SANITIZE ?= OFF

# Left out for the CPU also where an NVIDIA GPU is.
CUDA := $(if $(filter cuda%,$(BACKEND)),ON,OFF)

SOURCES := pyproject.toml CMakeLists.txt scripts/build_backend.py \
	$(wildcard csrc/*.* csrc/*/*.* metal/* tests/sim/extension/* tests/sim/runtime/metal_sim.h)

# With what SANITIZE adds, where it is asked for: an installation that has it serves the others, too.
INSTALLED := $(BIN)/.installed$(if $(filter ON,$(SANITIZE)),-sanitized)$(if $(filter ON,$(ORACLE)),-oracle)

.PHONY: demo test test-mlx-lm soak hostile load lint bench mac-report wheel clean

demo: $(INSTALLED)
	$(BIN)/mlx-paged demo

# One worker a core; `make test WORKERS=0` runs the tests in one process.
WORKERS ?= $(shell nproc 2> /dev/null || sysctl -n hw.ncpu)
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# mlx-lm's own tests, fetched from PyPI, without and with `import mlx_paged`. Takes some minutes.
test-mlx-lm: $(INSTALLED)
	$(BIN)/python -m pip install --quiet requests
	$(BIN)/python scripts/mlx_lm_tests/run.py

# A million tokens with random arrivals, aborts, slow readers and faults. Takes some minutes.
soak: $(INSTALLED)
	MLX_PAGED_SOAK_TOKENS=1000000 $(BIN)/python -m pytest -s tests/engine/test_soak.py

# 10,000 mutated bodies, and 100 generated requests for each path of the API.
hostile: $(INSTALLED)
	MLX_PAGED_HOSTILE_BODIES=10000 MLX_PAGED_HOSTILE_EXAMPLES=100 \
		$(BIN)/python -m pytest -s tests/server/test_server_hostile.py

# 256 clients at once for half a minute: aborts, slow readers, half-open sockets.
load: $(INSTALLED)
	MLX_PAGED_LOAD_CLIENTS=256 MLX_PAGED_LOAD_SECONDS=30 \
		$(BIN)/python -m pytest -s tests/server/test_server_load.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp \
		metal/*.h metal/*.metal tests/native/metal_host/*.h tests/native/metal_host/*.cpp \
		tests/sim/extension/*)

# Figures of this machine, written to bench/results.
bench: $(INSTALLED)
	$(BIN)/mlx-paged bench kernels --device cpu --batch 16 --context 2048 --group 1,4,8 --head-dim 64 \
		--dtype float32,bfloat16 --json bench/results/kernels-cpu.json
	$(BIN)/mlx-paged bench memory --answer-len 64,256 --json bench/results/memory-cpu.json
	$(BIN)/python bench/blas.py
	$(BIN)/python bench/sampling.py
	$(BIN)/python bench/generate.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/host_time.py

# On a Mac: build, tests on its GPU, kernels against its copy bandwidth. JSON and Markdown are written
# to bench/results, to be sent in.
mac-report: $(INSTALLED)
	$(BIN)/python bench/mac_report.py

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --config-settings=cmake.define.MLX_PAGED_CUDA=$(CUDA) --no-deps --wheel-dir dist .

# (--no-compile: all modules of all packages take half a minute. Python compiles those that it imports.)
$(INSTALLED): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python scripts/install_progress.py $(BIN)/python -m pip install --verbose --no-compile \
		--config-settings=cmake.define.MLX_PAGED_WERROR=$(WERROR) \
		--config-settings=cmake.define.MLX_PAGED_SANITIZE=$(SANITIZE) \
		--config-settings=cmake.define.MLX_PAGED_CUDA=$(CUDA) \
		--config-settings=cmake.define.MLX_PAGED_BUILD_TESTS=ON --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps mlx-vlm==$(MLX_VLM)
	touch $(BIN)/.installed $@
# What the extra `vision` needs besides: see pyproject.toml.
MLX_VLM := 0.7.10

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
