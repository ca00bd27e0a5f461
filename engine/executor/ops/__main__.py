"""Compile the kernels: `python -m quire.engine.executor.ops`."""

from quire.engine.executor.kernels_build import main

main()
