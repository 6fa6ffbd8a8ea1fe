# `make demo`, `make test` and `make lint`: each sets up what it needs, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# Versions of vLLM that `make test-vllm` asks, one after the other: the last whose CPU build takes 16-token blocks, and a
# newer one with 32. One alone: make test-vllm VLLM=0.32.0
VLLM ?= 0.28.0 0.32.0

# A thousand processes that tests start would each compile the modules that they import, 0.2 s of CPU for a gateway.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-vllm test soak dashboards check-grafana lint guard properties test-vllm test-compose test-clients test-pythons wheel clean test-alerts

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv >/dev/null 2>&1 || $(MAKE) --no-print-directory venv-from-debian
	@echo "Setting up .venv (once, about half a minute) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	@touch $@

# Debian keeps the part of `venv` that brings pip in a package of its own.
.PHONY: venv-from-debian
venv-from-debian:
	@rm -rf .venv
	@command -v apt-get >/dev/null && test "$$(id -u)" = 0 || { echo "$(PYTHON) -m venv does not work here. On Debian, as root: apt-get install python3-venv"; exit 1; }
	@echo "Installing python3-venv ..."
	@apt-get install -y -qq python3-venv >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; }
	@$(PYTHON) -m venv .venv

demo: setup
	@$(BIN)/loadgen demo $(ARGS)

# The same story with two real vLLM engines on the CPU: the newest of VLLM, kept in ~/.cache/hitherto.
demo-vllm: setup
	@folder=$$(PYTHON="$(PYTHON)" tests/vllm/install.sh $(lastword $(VLLM))) || { code=$$?; \
	  test $$code != 3 || echo "No vLLM here, for the reason above. \`make demo\` shows the same with simulated engines."; exit $$code; }; \
	$(BIN)/loadgen demo --vllm $$folder $(ARGS)

# Four at once on however few cores: tests that start processes wait a good part of their time. Files go in the order that
# tests/conftest.py gives them.
test: setup
	@$(BIN)/python -m pytest --ignore tests/vllm --ignore tests/containers --ignore tests/test_instructions.py --ignore tests/deploy/test_faults.py --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# The tests with made-up inputs, with new ones in each round: `make test` always tries the same. What they find becomes an
# `@example` of its test.
ROUNDS ?= 5
properties: setup
	@for round in $$(seq $(ROUNDS)); do \
	  $(BIN)/python -m pytest -m hypothesis --hypothesis-profile new --ignore tests/vllm --ignore tests/containers --numprocesses 4 $(ARGS) || exit; \
	done

# Each alert on real gateways and engines that are killed, stopped and slowed, with a real Prometheus: nine minutes.
test-alerts: setup
	@$(BIN)/python -m pytest tests/deploy/test_faults.py $(ARGS)

# Grafana's dashboards from deploy/grafana/boards; then their check against Grafana's own types, which needs npm.
dashboards: setup
	@$(BIN)/python -m deploy.grafana.dashboards

check-grafana: dashboards
	@$(BIN)/python -m deploy.grafana.check

# Style, imports and names; the formatter's layout; types, strict in the rooms that pyproject.toml names; and that all tests
# can be collected, also those that `make test` does not run. To mend what can be mended by itself: .venv/bin/ruff check --fix;
# .venv/bin/ruff format
lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --collect-only --quiet tests >.venv/collected || { tail -30 .venv/collected; exit 1; }

# The decision path's cost in instructions, which no load on the machine changes. Needs valgrind; skipped where it cannot be had.
guard: setup valgrind
	@$(BIN)/python -m pytest tests/test_instructions.py $(ARGS)

.PHONY: valgrind
valgrind:
	@command -v valgrind >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 || exit 0; \
	  echo "Installing valgrind ..."; install="apt-get install -y -qq --no-install-recommends valgrind"; \
	  $$install >/dev/null 2>&1 || { apt-get update -qq && $$install; } >/dev/null 2>&1 || true; }

# Against real vLLM (its CPU build), kept in ~/.cache/hitherto. Not part of `make test`.
test-vllm: setup
	@for version in $(VLLM); do \
	  folder=$$(PYTHON="$(PYTHON)" tests/vllm/install.sh $$version) || { code=$$?; \
	    test $$code = 3 && echo "SKIPPED: make test-vllm for vLLM $$version" && continue; exit $$code; }; \
	  HITHERTO_VLLM=$$folder $(BIN)/python -m pytest tests/vllm $(ARGS) || exit; \
	done

# An hour of mixed load over engines and a Redis that fail. CI has five minutes of it (`make soak ARGS="--minutes 5"`), each
# fault three or four times; `ARGS=--quick` has each once, in three minutes.
soak: setup
	@$(BIN)/python -m bench.soak $(ARGS)

# OpenAI's, Anthropic's and LangChain's clients, LiteLLM's proxy and `vllm bench serve`, in environments of their own below
# ~/.cache/hitherto, against simulated engines and the newest of VLLM (left out where it cannot be had).
test-clients: setup
	@clients=$$(PYTHON="$(PYTHON)" tests/clients/install.sh) || { code=$$?; test $$code = 3 && echo "SKIPPED: make test-clients" && exit; exit $$code; }; \
	vllm=$$(PYTHON="$(PYTHON)" tests/vllm/install.sh $(lastword $(VLLM))) && export HITHERTO_VLLM=$$vllm; \
	HITHERTO_PYTHON=$(CURDIR)/$(BIN)/python $$clients/bin/python -m pytest tests/clients --confcutdir tests/clients -W default $(ARGS)

# The wheel in empty environments: install, serve, chat, unit tests.
PYTHONS ?= 3.11 3.12 3.13
test-pythons:
	@tests/deploy/pythons.sh $(PYTHONS)

# dist/hitherto-*.whl. For a package registry: make wheel REPOSITORY=https://HOST/OWNER/hitherto REF=v0.1.0
REF ?= main
wheel: setup
	@$(BIN)/python deploy/wheel.py $(if $(REPOSITORY),--repository "$(REPOSITORY)" --ref "$(REF)")

# compose.yaml and compose.gateway.yaml in real containers, without a Docker daemon: as root on Debian. Three minutes, and
# two more the first time, which installs podman, and makes images in ~/.cache/hitherto/containers. Not part of `make test`.
test-compose: setup
	@folder=$$(PYTHON="$(PYTHON)" tests/containers/install.sh) || { code=$$?; \
	  test $$code = 3 && echo "SKIPPED: make test-compose" && exit; exit $$code; }; \
	HITHERTO_CONTAINERS=$$folder flock $$folder $(BIN)/python -m pytest tests/containers -s -v $(ARGS)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
