# The commands of this project. Each starts with `make install`, which is quick without changes.
#
#   make demo [BOOTSTRAP=host:port]     delayed messages, a kill and a restart, live
#   make test [PYTEST_ARGS="-k wheel"]  all tests
#   make bench [BENCH_ARGS=...]         measurements
#   make check [PYTEST_ARGS=...]        lint, and every test that needs no broker, JVM or browser: a minute
#   make nightly                        the state machines of tests/model, for hours; tests that wait for minutes
#   make lint                           format, lint, types, prose
#   make lock                           the lock files anew: all packages, those of the image, the connector's jars
#   make image [IMAGE_ARGS=...]         the container image, with docker
#   make audit [AUDIT_ARGS=--lenient]   known vulnerabilities of the image's components
#   make sbom                           dist/sbom.json, the image's components: Python, Java, Debian (CycloneDX)
#   make messages                       docs/messages.md: the messages of each error's code, from the source
#   make chart                          the generated parts of helm/delay-bridge; SNAPSHOTS=1 also its tests' snapshots
#   make matrix [KAFKA="4.2.2 4.4.0"]   the tests of transactions and delivery on each release of Kafka: docs/brokers.md
#   make injections [KAFKA="4.2.2 4.4.0"]  requests of transactions that arrive late, twice or never, by the thousand
#   make faults                         the fault table of docs/guarantees.md, from the tests' marks and docstrings
#   make tools                          what tests need beside Python and Java: helm and promtool, into .cache/bin
#   make browser                        a Chromium for the page's tests, from npm packages, into .cache/browser
#   make kubernetes                     a Kubernetes API likewise, to install the chart into (with Debian's etcd-server)
#   make clean, make distclean          caches; also the environment and the broker's jars
#
# PYTHON=... chooses the interpreter of a new environment.

SHELL := /bin/bash
.DEFAULT_GOAL := install
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
HELM_VERSION := v3.22.0
KUBERNETES_VERSION := 1.34.4
CYCLONEDX := cyclonedx-bom==7.5.0
SOURCES := $(wildcard bridge timerstore dev demo bench release tests)

.PHONY: install prerequisites demo test check nightly bench lint format lock image audit sbom chart messages faults matrix injections tools helm promtool browser kubernetes clean distclean

install: prerequisites $(VENV)/.installed

# Java and the interpreter's version are checked each time, for 0.1 s: either may have changed.
prerequisites:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	version=$$("$$java" -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p' | head -n 1); \
	if [ "$${version:-0}" -lt 17 ]; then \
	  echo "Java 17 or later is needed (found: $${version:-none}); Debian: apt-get install openjdk-17-jdk-headless" >&2; exit 1; \
	fi; \
	command -v "$${java}c" >/dev/null || { \
	  echo "A JDK is needed: there is no $${java}c; Debian: apt-get install openjdk-17-jdk-headless" >&2; exit 1; \
	}
	@if [ -n "$(PYTHON)" ] && [ -x $(BIN)/python ]; then \
	  short='import sys; print("%d.%d" % sys.version_info[:2])'; \
	  wanted=$$($(PYTHON) -c "$$short") && found=$$($(BIN)/python -c "$$short") || exit 1; \
	  if [ "$$wanted" != "$$found" ]; then \
	    echo "$(VENV) was made with Python $$found, not $$wanted: make distclean first" >&2; exit 1; \
	  fi; \
	fi

$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$python"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "Python 3.11 or later with venv is needed; PYTHON=... names one (Debian: apt-get install python3-venv)" >&2; exit 1

$(VENV)/.installed: requirements.lock pyproject.toml $(addprefix bridge/install/,connector.py maven.py frame_writer.py class_archive.py) $(wildcard bridge/ingest/java/*.java) | $(BIN)/python
	@echo "Installing into $(VENV) (the first time this takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m bridge.install.connector install >/dev/null
	@$(BIN)/python -m bridge.install.frame_writer install >/dev/null
	@$(BIN)/python -m bridge.install.class_archive install >/dev/null 2>&1 || echo "No archive of classes: starts take longer" >&2
	@touch $@

demo: install
	@$(BIN)/python -m demo $(if $(BOOTSTRAP),--bootstrap $(BOOTSTRAP)) $(DEMO_ARGS)

# Four at a time: system tests spend much of their time waiting for due messages. tests/distribution.py has the order.
PARALLEL := --numprocesses 4 --dist loadfile

# On a new machine helm is built while the packages are installed. Python's byte code is kept for the bridges that tests
# start, even if the environment forbids it.
test:
	@$(MAKE) --no-print-directory --jobs 2 install tools
	@$(BIN)/python -m dev.broker.archive >/dev/null 2>&1 || echo "No archive of the broker's classes: starts take longer" >&2
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# tests/conftest.py marks tests by their needs; properties and machines try few examples here. They keep two cores busy:
# a third process takes longer. pytest's byte code of 200 files is kept for the next run, even if the environment
# forbids it: each process saves 4 s.
check: lint
	HYPOTHESIS_PROFILE=check PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not (system or broker or jvm or browser)" $(PYTEST_ARGS)

nightly: install
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --numprocesses 2 tests/model $(PYTEST_ARGS)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --numprocesses 0 -m nightly $(PYTEST_ARGS)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --numprocesses 0 tests/system/test_bounds.py tests/system/test_crashes.py tests/system/test_random_commands.py $(PYTEST_ARGS)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m tests.injections --random --minutes 60

bench: install
	@$(BIN)/python -m bench $(BENCH_ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python -m dev.prose

format: install
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

# Hashes, all platforms, and no address of an index: the lock has the versions, the machine's configuration the source.
lock: install
	$(BIN)/uv pip compile pyproject.toml --quiet --extra bridge --extra dev --extra otel --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-annotate --custom-compile-command "make lock" --output-file requirements.lock
	$(BIN)/uv pip compile pyproject.toml --quiet --extra bridge --extra build --extra otel --constraint requirements.lock --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock" \
	  --output-file requirements.runtime.lock
	cd $(VENV)/share/delay-bridge/jars && sha256sum $$(ls *.jar | grep -v '^delay-bridge-') > $(CURDIR)/connector.lock

image:
	docker build --tag delay-bridge:$(VERSION) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION=$$(git rev-parse HEAD) $(IMAGE_ARGS) .

# AUDIT_ARGS=--lenient: a failed look-up is a warning, not a failure.
audit: sbom
	$(BIN)/python -m release.audit --uv $(BIN)/uv $(AUDIT_ARGS)

# Debian packages have versions only if a container engine has the image.
sbom: install
	@mkdir -p dist
	@$(BIN)/uv tool run --quiet --from $(CYCLONEDX) cyclonedx-py requirements requirements.runtime.lock \
	  --output-format JSON --output-file dist/python.json
	@docker run --rm --pull never --network none --entrypoint dpkg-query delay-bridge:$(VERSION) \
	  --show --showformat '$${Package} $${Version} $${Architecture}\n' > dist/packages.txt 2>/dev/null || true
	@$(BIN)/uv run --quiet --no-project --python $(BIN)/python --with $(CYCLONEDX) python -m release.sbom \
	  --python dist/python.json --packages dist/packages.txt --output dist/sbom.json \
	  --spark "$$($(BIN)/python -c 'import pyspark; print(pyspark.__path__[0])')/jars" \
	  --connector $(VENV)/share/delay-bridge/jars

chart: install
	$(BIN)/python -m release.chart
	$(if $(SNAPSHOTS),SNAPSHOTS=write $(BIN)/python -m pytest -q tests/packaging/helm -k is_the_snapshot)

messages: install
	$(BIN)/python -m release.messages

faults: install
	$(BIN)/python -m release.faults

# A quarter of an hour or more of two cores; it resumes after an interruption.
matrix: install
	$(BIN)/python -m release.brokers --run $(KAFKA)

# Hours for each release; it resumes after an interruption. INJECTIONS_ARGS="--minutes 20 --only late" does a part. The
# results: `.venv/bin/python -m release.injections .cache/injections.json`.
injections: install
	$(BIN)/python -m tests.injections $(KAFKA) $(INJECTIONS_ARGS)

# Without one of them, its tests are skipped, with a message.
tools:
	@command -v helm >/dev/null || $(MAKE) --no-print-directory helm || echo "No helm: the chart's tests are skipped" >&2
	@command -v promtool >/dev/null || $(MAKE) --no-print-directory promtool || echo "No promtool: alerts are not played" >&2

# Half a minute of two cores, once; the tests look here and on the PATH.
helm: .cache/bin/helm

.cache/bin/helm:
	@command -v go >/dev/null || { echo "Go is needed to build helm; or put a helm on the PATH" >&2; exit 1; }
	GOBIN=$(CURDIR)/.cache/bin go install -p 2 helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)

# From Debian's package, without an installation: that would start a server.
promtool: .cache/bin/promtool

.cache/bin/promtool:
	@command -v apt-get >/dev/null || { echo "promtool is taken from Debian's package prometheus; or put one on the PATH" >&2; exit 1; }
	@mkdir -p $(@D)
	@unpacked=$$(mktemp -d) && trap 'rm -rf "$$unpacked"' EXIT && cd "$$unpacked" && \
	  { apt-get download --quiet --quiet prometheus || { apt-get update --quiet --quiet && apt-get download --quiet --quiet prometheus; }; } 2>apt.log && \
	  dpkg --extract prometheus_*.deb . && install -m 755 usr/bin/promtool $(CURDIR)/$@ || { cat "$$unpacked/apt.log" >&2; exit 1; }

# The tests fetch it themselves if npm is there; SNAPSHOTS=1 also makes the pictures of docs/page.md anew.
browser: install
	$(BIN)/python -m dev.browser
	$(if $(SNAPSHOTS),SNAPSHOTS=write $(BIN)/python -m pytest -q tests/browser -k pictures)

# Ten minutes of two cores, once.
kubernetes: .cache/bin/kube-apiserver

.cache/bin/kube-apiserver:
	@command -v go >/dev/null || { echo "Go is needed to build Kubernetes" >&2; exit 1; }
	tests/packaging/helm/kubernetes.sh $(KUBERNETES_VERSION) .cache/bin

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log artifacts
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .cache
