# syntax=docker/dockerfile:1
# An engine: vLLM's own image and kvferry in it:   docker build --tag kvferry .
# vllm-router:                                     docker build --tag kvferry-router --target router .
# The accuracy test, on CPUs only:                 docker build --tag kvferry-accuracy --target accuracy .
# How to run them: docs/deployment.md.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY plan plan
COPY trace trace
COPY link link
COPY scheduler scheduler
COPY worker worker
COPY connector connector
COPY cli cli
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# A job that ends by itself, from a checkout as everywhere else: it has no port to ask.
FROM ${PYTHON_IMAGE} AS accuracy
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvferry \
    && install --directory --owner=kvferry /home/kvferry/checkout
USER 10001
WORKDIR /home/kvferry/checkout
COPY --chown=10001 . .
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="$TORCH_INDEX" python -m scripts.bootstrap cpu
ENV KVFERRY_DEVICE=cpu
HEALTHCHECK NONE
ENTRYPOINT ["scripts/run_accuracy_test.sh"]

# Healthy as long as one engine of each pool is: its /health fails with the first engine that does.
FROM ${PYTHON_IMAGE} AS router
COPY requirements/router.lock /tmp/requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements/router.lock \
    && pip check \
    && useradd --create-home --uid 10001 kvferry
USER 10001
WORKDIR /home/kvferry
ENV HEALTH_PORT=30000
EXPOSE 30000 29000
HEALTHCHECK --interval=10s --timeout=5s --start-period=32m --retries=3 \
    CMD ["python3", "-c", "import os; from urllib.request import urlopen; urlopen(f'http://127.0.0.1:{os.environ[\"HEALTH_PORT\"]}/readiness', timeout=4)"]
ENTRYPOINT ["vllm-router"]

# UCX comes with NIXL, the drivers of RDMA devices come from the system. pip downloads nothing, so it changes nothing of
# the base image, and fails if that lacks what kvferry needs; PIP_NO_INDEX=0 lets it fetch that.
# hadolint ignore=DL3006
FROM ${VLLM_IMAGE} AS engine
ARG PIP_NO_INDEX=1
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ibverbs-providers libibverbs1 libnuma1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvferry
COPY --from=wheel /wheels /tmp/wheels
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --find-links /tmp/wheels 'kvferry[vllm]' && kvferry --version
USER 10001
WORKDIR /home/kvferry
ENV HEALTH_PORT=8000 \
    VLLM_NO_USAGE_STATS=1
EXPOSE 8000 5600
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=6 \
    CMD ["python3", "-c", "import os; from urllib.request import urlopen; urlopen(f'http://127.0.0.1:{os.environ[\"HEALTH_PORT\"]}/health', timeout=4)"]
LABEL org.opencontainers.image.version=0.1.0 \
      org.opencontainers.image.source=https://github.com/kvferry/kvferry \
      org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["vllm", "serve"]
