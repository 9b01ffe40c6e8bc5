# README's two commands are `make demo` and `make test`; each does all its own set-up.

PYTHON ?= python3
VENV ?= .venv
CACHE ?= $(or $(GPUMEM_CACHE),$(HOME)/.cache/gpumem-otel)
TORCH ?= 2.15.0
DURATION ?= 30
SERVERS_BIN = $(CACHE)/servers/bin
K8S_BIN = $(CACHE)/k8s/bin
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
SOURCES = gpumem_otel tests tools benchmarks grafana helm hatch_build.py deploy

# Many tests wait for processes of their own: two files at a time take little more than half as long.
TWO = -n 2 --dist loadfile

SERVED = GPUMEM_REQUIRE_SERVERS=1 GPUMEM_SERVERS_BIN=$(SERVERS_BIN)
CLUSTERED = $(SERVED) GPUMEM_REQUIRE_K8S=1 GPUMEM_K8S_BIN=$(K8S_BIN)

.PHONY: demo test test-oldest servers check-deploy checked check-servers check-helm check-page test-torch \
	test-gpu fuzz lint types docs docs-check docs-site pictures dashboards format clean help

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# A machine with a GPU trains for real: torch from the system's Python where it is there, installed
# otherwise. Without a GPU nothing of torch (5 GB) is needed.
$(VENV)/demo.stamp: pyproject.toml
	@if nvidia-smi -L >/dev/null 2>&1 && $(PYTHON) -c 'import torch' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi
	$(PIP) install -c constraints.txt -e .
	@if nvidia-smi -L >/dev/null 2>&1 && ! $(VENV)/bin/python -c 'import torch' 2>/dev/null; then \
		$(PIP) install -c constraints.txt -e '.[torch]'; fi
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/demo.stamp ## train on the GPU, or replay a recorded training run without one
	$(VENV)/bin/gpumem-otel demo --duration $(DURATION) $(DEMO)

test: $(VENV)/test.stamp ## all tests that need neither a GPU, nor torch, nor servers
	$(VENV)/bin/python -m pytest $(TWO) -m 'not servers' $(TESTS)

servers: ## build the real servers and the programs of Kubernetes, which takes a while at first
	tools/servers/build.sh $(SERVERS_BIN)
	tools/k8s/build.sh $(K8S_BIN)

# What lies in grafana/, deploy/ and helm/, in all that can be had here of what reads it.
# Servers wait more than they work, so two files at a time.
DEPLOYED = $(CLUSTERED) GPUMEM_SAID=$(CACHE)/said.jsonl $(VENV)/bin/python -m pytest $(TWO) \
	tests/servers tests/unit/test_alert_rules.py tests/unit/test_dashboards.py \
	tests/unit/test_deploy_*.py tests/unit/test_helm_*.py

check-deploy: $(VENV)/test.stamp servers ## dashboards, alerts, deploy/, helm/ in real servers and a real Kubernetes API
	@rm -f $(CACHE)/said.jsonl
	$(DEPLOYED) $(TESTS)
	$(if $(TESTS),,$(VENV)/bin/python tools/said.py $(CACHE)/said.jsonl --check)

checked: $(VENV)/test.stamp servers ## the same, and docs/internals/checked.md is written from what the tools reported
	@rm -f $(CACHE)/said.jsonl
	$(DEPLOYED)
	$(VENV)/bin/python tools/said.py $(CACHE)/said.jsonl

check-servers: $(VENV)/test.stamp ## of that, what needs no Kubernetes
	tools/servers/build.sh $(SERVERS_BIN)
	$(SERVED) $(VENV)/bin/python -m pytest -m servers $(TESTS)

check-helm: $(VENV)/test.stamp servers ## of that, the chart: installed, scraped, removed
	$(CLUSTERED) $(VENV)/bin/python -m pytest tests/servers/test_helm*.py $(TESTS)

web/node_modules/.package-lock.json: web/package-lock.json
	cd web && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# Installing builds the page, where its sources have changed; here it must not fail silently.
check-page: $(VENV)/test.stamp web/node_modules/.package-lock.json ## the page: types, unit tests, and in real Chromium
	cd web && npm run --silent check && npm run --silent test
	GPUMEM_OTEL_REQUIRE_PAGE=1 $(PIP) install -c constraints.txt -e '.[browser]'
	GPUMEM_REQUIRE_BROWSER=1 $(VENV)/bin/python -m pytest -m browser tests/browser $(TESTS)

# What pyproject.toml promises: its lower bounds, which nobody else here installs.
test-oldest: ## the parts that stand on other packages, on the oldest of them that we promise
	$(PYTHON) -m venv $(CACHE)/oldest
	$(CACHE)/oldest/bin/python -m pip --disable-pip-version-check --quiet install \
		-c constraints-oldest.txt -e '.[test]'
	$(CACHE)/oldest/bin/python -m pytest tests/unit/cli tests/unit/metrics tests/unit/push tests/unit/serve \
		tests/integration/test_agent.py tests/integration/test_listener.py \
		tests/integration/test_otlp_export.py

# Outside the checkout: an installed torch is 5 GB.
test-torch: ## the tests that touch torch, on TORCH=2.15.0 or an older one
	$(PYTHON) -m venv $(CACHE)/torch-$(TORCH)
	$(CACHE)/torch-$(TORCH)/bin/python -m pip --disable-pip-version-check --quiet install \
		'torch==$(TORCH)' 'numpy<$(if $(filter 2.3%,$(TORCH)),2,3)' setuptools
	$(CACHE)/torch-$(TORCH)/bin/python -m pip --disable-pip-version-check --quiet install \
		-e '.[test]' 'pytest-xdist>=3.6'
	$(CACHE)/torch-$(TORCH)/bin/python -m pytest $(TWO) -m torch $(TESTS)

test-gpu: ## the tests that need a CUDA device, with this Python's torch
	$(PYTHON) -m pytest -m gpu $(TESTS)

fuzz: $(VENV)/test.stamp ## a hundred thousand damaged and made-up files through every verb
	GPUMEM_FUZZ=17000 $(VENV)/bin/python -m pytest --timeout 0 tests/unit/snapshot/test_fuzz_verbs.py

lint: $(VENV)/test.stamp ## ruff: rules and format; words that are not plain English
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/python tools/words.py

types: $(VENV)/test.stamp ## mypy --strict
	$(VENV)/bin/mypy

docs: $(VENV)/test.stamp ## write the generated tables in docs/
	$(VENV)/bin/python tools/docs.py

docs-check: $(VENV)/test.stamp ## generated tables are current, links and commands are true
	$(VENV)/bin/python tools/docs.py --check

pictures: $(VENV)/test.stamp ## draw the pictures in docs/img, of recordings and replayed jobs (needs chromium)
	$(VENV)/bin/python tools/pictures/pages.py
	tools/servers/build.sh $(SERVERS_BIN)
	GPUMEM_SERVERS_BIN=$(SERVERS_BIN) $(VENV)/bin/python tools/pictures/make.py

$(CACHE)/site/done.stamp: tools/site/requirements.txt
	$(PYTHON) -m venv $(CACHE)/site
	$(CACHE)/site/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

# Warnings are errors: a page that is in no menu, a link or an anchor that leads nowhere.
docs-site: $(CACHE)/site/done.stamp ## the docs as a site, in build/site; every link in it leads somewhere
	NO_MKDOCS_2_WARNING=1 $(CACHE)/site/bin/mkdocs build --strict
	$(CACHE)/site/bin/python tools/site/check.py build/site

dashboards: $(VENV)/test.stamp ## write grafana/dashboards/*.json and their tables in docs/
	$(VENV)/bin/python grafana/generate.py

format: $(VENV)/test.stamp
	$(VENV)/bin/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis gpumem-demo
