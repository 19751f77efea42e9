# syntax=docker/dockerfile:1
# Engines on NVIDIA GPUs, and their router:   docker build -t kvferry .
# The accuracy test, on CPUs only:            docker build -t kvferry-cpu --build-arg DEVICE=cpu .
# How to run both: docs/deployment.md. Python packages are pinned, by version and hash, in requirements/*.lock.
ARG DEVICE=cuda
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY plan plan
COPY trace trace
COPY scheduler scheduler
COPY worker worker
COPY connector connector
COPY cli cli
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# With compilers: Triton and FlashInfer compile kernels at an engine's first start. UCX comes with NIXL, the drivers of
# RDMA devices come from the system.
FROM ${CUDA_IMAGE} AS image-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ gcc ibverbs-providers libibverbs1 libnuma1 librdmacm1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvferry \
    && python3 -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1
COPY requirements/cuda.lock /tmp/requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements/cuda.lock
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && pip check && kvferry --version
USER 10001
WORKDIR /home/kvferry
EXPOSE 8000 5600
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=6 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]

# A job that ends by itself, from a checkout as everywhere else: it has no port to ask.
FROM ${PYTHON_IMAGE} AS image-cpu
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

# hadolint ignore=DL3006
FROM image-${DEVICE}
