# deepspeed_gear in an image: `docker build --target cpu -t gear:cpu .`, and `docker build -t gear:cuda .` for GPUs.
# docs/how-to/containers.md; launch/check_image.py checks this file where there is no Docker.
FROM debian:12.11-slim AS base
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates python3 python3-venv && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/gear
ENV VIRTUAL_ENV=/opt/gear PATH=/opt/gear/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /work
CMD ["gear", "doctor"]

FROM base AS torch-cpu
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --extra-index-url "$TORCH_INDEX" "torch==$TORCH+cpu"
ENV DS_ACCELERATOR=cpu

# Wheels for the release of torch and the Python of this file, with the native ops compiled for any x86-64 or ARM64.
FROM torch-cpu AS build
ARG DEEPSPEED=0.19.8
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ python3-dev && \
    rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install "setuptools>=77" wheel ninja && \
    DS_BUILD_SHM_COMM=1 pip wheel --no-deps --no-build-isolation -w /wheels "deepspeed==$DEEPSPEED" && \
    pip install /wheels/deepspeed-*.whl
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY ops/csrc ops/csrc
COPY deepspeed_gear deepspeed_gear
RUN DS_BUILD_GEAR=1 pip wheel --no-deps --no-build-isolation -w /wheels .

# nvcc comes from PyPI, of the CUDA release that PyPI's torch is built with; a GPU or a driver is not needed.
FROM build AS build-cuda
ARG CUDA=13.0.2
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0+PTX"
ENV CUDA_HOME=/opt/gear/lib/python3.11/site-packages/nvidia/cu13
RUN pip install "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==$CUDA" && \
    DS_BUILD_GEAR=1 DS_BUILD_GEAR_CUDA=1 pip wheel --no-deps --no-build-isolation -w /wheels .

FROM torch-cpu AS cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install /wheels/*.whl && gear report --load --quiet

FROM base AS cuda
ARG TORCH=2.13.0
RUN pip install "torch==$TORCH"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=build-cuda,source=/wheels,target=/wheels \
    pip install /wheels/*.whl && DS_ACCELERATOR=cpu gear report --load --quiet
