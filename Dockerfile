# Three images from one file; what they install is in .ci/image.sh.
#
#   docker build --target gateway    -t quire-gateway:0.3.0 .
#   docker build --target engine     -t quire-engine:0.3.0 .      (GPU, or CPU where there is none)
#   docker build --target engine-cpu -t quire-engine-cpu:0.3.0 .  (CPU only: needs no CUDA image)
#   docker run --gpus 2 --shm-size 1g ... --tensor-parallel 2   divides a model among two GPUs
#   --build-arg GPUS='9.0' compiles for some GPUs only: minutes instead of a quarter of an hour
#   --secret id=pip,src=$HOME/.config/pip/pip.conf installs from your own package index; no layer holds the file
#
# The index decides which torch is installed: PyPI's needs gigabytes for CUDA.  For engine-cpu give pip an index of CPU builds.
# `make images` builds and tries gateway and engine-cpu without Docker.
#
# Nothing is written below / at run time: HOME, HF_HOME and XDG_CACHE_HOME name the folders of caches (helm/ mounts them).
ARG PYTHON=3.11
# must be the CUDA that torch is built with: .ci/image.sh checks it
ARG CUDA=13.0.2

FROM python:${PYTHON}-slim-bookworm AS base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp quire
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS gateway-build
COPY . /src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf /src/.ci/image.sh gateway /opt/quire

FROM base AS engine-build
COPY . /src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf /src/.ci/image.sh engine /opt/quire

FROM engine-build AS model
RUN --mount=type=secret,id=pip,target=/etc/pip.conf /src/.ci/image.sh model /opt/quire

# USER does not own what COPY brings; large layers come last
FROM base AS gateway
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["quire"]
CMD ["gateway", "--host", "0.0.0.0"]
# of the demo model what a gateway needs: tokenizer, configuration and licence
COPY --from=model /opt/quire/models/smollm2-135m/*.json /opt/quire/models/smollm2-135m/*.jinja \
  /opt/quire/models/smollm2-135m/LICENSE /opt/quire/models/smollm2-135m/
COPY --from=gateway-build /opt/quire /opt/quire

# what both engines have but for the kernels
FROM base AS engine-base
ENV QUIRE_KERNELS=/opt/quire/kernels/libquire.so
USER 10001:10001
ENTRYPOINT ["quire"]
CMD ["engine"]
COPY --from=model /opt/quire/models /opt/quire/models
COPY --from=engine-build /opt/quire /opt/quire

FROM engine-build AS compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

FROM compiler AS kernels-cpu
RUN GPUS= /src/.ci/image.sh kernels /opt/quire

FROM engine-base AS engine-cpu
ENV QUIRE_DEVICE=cpu
COPY --from=kernels-cpu /opt/quire/kernels /opt/quire/kernels

FROM nvidia/cuda:${CUDA}-devel-ubuntu22.04 AS cuda

FROM compiler AS kernels
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ENV PATH=/usr/local/cuda/bin:$PATH
ARG GPUS="8.0 8.6 8.9 9.0 10.0"
RUN GPUS="$GPUS" /src/.ci/image.sh kernels /opt/quire

FROM engine-base AS engine
COPY --from=kernels /opt/quire/kernels /opt/quire/kernels
