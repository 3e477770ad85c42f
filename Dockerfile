# CPU, or a GPU through NVIDIA's container toolkit: docker build -t calfat .
# Another base, such as NVIDIA's:                   docker build -t calfat --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu22.04 .
# PyTorch's far smaller CPU build: add --build-arg PIP_EXTRA_INDEX_URL=URL, the index that PyTorch's installation page lists.
# Then, with runs/ in this folder:                  docker run --rm -v "$PWD/runs:/work/runs" calfat run calfat_digits
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
# Some bases have no Python. Where apt's is newer than 3.11 (Ubuntu 24.04), make brings 3.11.
RUN apt-get update \
    && apt-get install -y --no-install-recommends make python3 python3-venv python3-pip \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/calfat
COPY . .
ARG PIP_EXTRA_INDEX_URL=""
RUN PIP_NO_CACHE_DIR=1 make .venv/.installed
ENV PATH="/opt/calfat/.venv/bin:${PATH}"
WORKDIR /work
ENTRYPOINT ["calfat"]
CMD ["--help"]
