# syntax=docker/dockerfile:1
# docker build --target cpu --tag posttrain:cpu .
# docker build --tag posttrain:cuda .             # then: docker run --gpus all --shm-size 8g ... (docs/install.md)
ARG PYTHON=3.12

# --- Environments are made here; of these stages the images take /opt/venv alone.
FROM python:${PYTHON}-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# reasoning-gym requires pycosat, which is compiled.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/venv
RUN --mount=type=cache,target=/root/.cache/pip pip install "uv>=0.9" && uv venv /opt/venv
WORKDIR /src
# Packages come before the code: a change of the code leaves their layers in the cache.
COPY pyproject.toml ./
COPY constraints ./constraints

FROM build AS build-cpu
ARG UV_TORCH_BACKEND=cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --requirements pyproject.toml --extra train --extra gym --constraints constraints/cpu.txt
COPY . .
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --no-deps .

FROM build AS build-cuda
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --requirements pyproject.toml --extra train --extra gym --extra vllm --extra quant --extra track --extra eval \
      --constraints constraints/cuda.txt
COPY . .
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --no-deps .

# --- What runs: a user without rights. Any other may take its place (docker run --user), so both folders are open to all.
FROM python:${PYTHON}-slim-bookworm AS runtime
RUN useradd --uid 1000 --no-create-home --home-dir /cache posttrain && install --directory --mode 1777 /work /cache
ENV PATH=/opt/venv/bin:$PATH HOME=/cache USER=posttrain PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["posttrain"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
USER 1000

FROM runtime AS cuda
# Triton, which torch.compile and vLLM call, compiles a launcher for each kernel when it first runs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/venv /opt/venv
USER 1000
