# Two images from one file; what they install is in .ci/image.sh.
#
#   docker build --target gateway -t quire-gateway:0.2.0 .
#   docker build --target engine  -t quire-engine:0.2.0 .     (GPU, or CPU where there is none)
#   docker run --gpus 2 --shm-size 1g ... --tensor-parallel 2   divides a model among two GPUs
#   --build-arg GPUS='9.0' compiles for some GPUs only: minutes instead of a quarter of an hour
#
# Nothing is written below / at run time: HOME, HF_HOME and XDG_CACHE_HOME name the folders of caches (helm/ mounts them).
ARG PYTHON=3.11
# must be the CUDA that torch is built with: .ci/image.sh checks it
ARG CUDA=13.0.2

FROM nvidia/cuda:${CUDA}-devel-ubuntu22.04 AS cuda

FROM python:${PYTHON}-slim-bookworm AS base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp quire
ENV PATH=/opt/quire/bin:/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS gateway-build
COPY . /src
RUN /src/.ci/image.sh gateway /opt/quire

FROM base AS engine-build
COPY . /src
RUN /src/.ci/image.sh engine /opt/quire

FROM engine-build AS model
RUN /src/.ci/image.sh model /opt/quire

FROM engine-build AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ARG GPUS="8.0 8.6 8.9 9.0 10.0"
RUN GPUS="$GPUS" /src/.ci/image.sh kernels /opt/quire

FROM base AS gateway
COPY --from=gateway-build /opt/quire /opt/quire
# of the demo model what a gateway needs: tokenizer, configuration and licence
COPY --from=model /opt/quire/models/smollm2-135m/*.json /opt/quire/models/smollm2-135m/*.jinja \
  /opt/quire/models/smollm2-135m/LICENSE /opt/quire/models/smollm2-135m/
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["quire"]
CMD ["gateway", "--host", "0.0.0.0"]

FROM base AS engine
COPY --from=engine-build /opt/quire /opt/quire
COPY --from=kernels /opt/quire/kernels /opt/quire/kernels
COPY --from=model /opt/quire/models /opt/quire/models
ENV QUIRE_KERNELS=/opt/quire/kernels/libquire.so
USER 10001:10001
ENTRYPOINT ["quire"]
CMD ["engine"]
