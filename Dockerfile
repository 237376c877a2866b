# The bridge with all its dependencies: nothing is downloaded when it runs.
#
#   docker build --tag delay-bridge:0.1.0 .
#
# Python packages are checked against requirements.runtime.lock, the connector's jars against connector.lock. The base
# image is yours to pin: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends maven openjdk-17-jdk-headless \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/delay-bridge
ENV PATH=/opt/delay-bridge/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.runtime.lock ./
RUN sed -n '/^setuptools==/,/[^\\]$/p' requirements.runtime.lock > build.lock \
 && pip install --quiet --require-hashes --requirement build.lock \
 && pip install --quiet --require-hashes --no-build-isolation --requirement requirements.runtime.lock
COPY bridge/__init__.py bridge/errors.py ./bridge/
COPY bridge/install/__init__.py bridge/install/connector.py bridge/install/maven.py ./bridge/install/
COPY bridge/spark/__init__.py bridge/spark/installed.py ./bridge/spark/
COPY connector.lock ./
RUN python -m bridge.install.connector install --into /opt/delay-bridge/share/delay-bridge/jars \
 && cd /opt/delay-bridge/share/delay-bridge/jars \
 && sha256sum --check --strict --quiet /src/connector.lock \
 && test "$(ls | wc -l)" -eq "$(wc -l < /src/connector.lock)"
COPY pyproject.toml README.md LICENSE ./
COPY bridge ./bridge
COPY timerstore ./timerstore
RUN pip install --quiet --no-deps --no-build-isolation . \
 && python -m bridge.install.frame_writer install --into /opt/delay-bridge/share/delay-bridge/jars
# Files that a running bridge never opens: half of Spark, other tests and headers, and the installers themselves.
COPY release/leave-out.sh release/unused-jars.txt ./release/
RUN packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && release/leave-out.sh release/unused-jars.txt "$packages/pyspark/jars" \
 && cd "$packages" \
 && rm -rf pyspark/examples pyspark/tests pyspark/R pyspark/licenses pyspark/data pyspark/python/lib/*.zip.orig \
      pyarrow/include pyarrow/tests pyarrow/src numpy/tests \
      pyarrow/libarrow_flight.so* pyarrow/libarrow_python_flight.so* pyarrow/_flight*.so \
 && find . -name __pycache__ -prune -exec rm -rf {} + \
 && pip uninstall --quiet --yes setuptools pip

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="delay-bridge" \
      org.opencontainers.image.description="Delayed messages for Kafka, exactly once" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless libnss-wrapper ca-certificates procps \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /usr/share/doc /usr/share/man \
 && groupadd --gid 10001 bridge \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /bin/false bridge \
 && mkdir --mode 1777 /var/lib/delay-bridge
COPY --from=build /opt/delay-bridge /opt/delay-bridge
COPY release/entrypoint.sh /usr/local/bin/entrypoint
# Made once, not at each start: Spark's classes in an archive that this very JVM maps, and the bytecode of all Python
# modules that are used.
RUN cd /tmp && /opt/delay-bridge/bin/python -m bridge.install.class_archive install \
 && /opt/delay-bridge/bin/python -c 'import bridge.api.application, bridge.http.server, bridge.runtime.app, bridge.commands.cli, urllib.request' \
 && rm -rf /tmp/*
ENV PATH=/opt/delay-bridge/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEALTH_URL=http://127.0.0.1:8080/livez
# Any other user will do as well. Where the root file system is read-only, /tmp and /dev/shm must not be, and /tmp must
# allow execution: Java's compression libraries unpack themselves there.
USER 10001:10001
WORKDIR /var/lib/delay-bridge
VOLUME /var/lib/delay-bridge
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=6s --start-period=30s --retries=4 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ['HEALTH_URL'], timeout=5)"]
ENTRYPOINT ["entrypoint"]
CMD ["run"]
