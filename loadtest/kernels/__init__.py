"""Kernel benchmarks, compared with the minimum time for their bytes or operations on this machine (roofline).

    python -m quire.loadtest.kernels [--quick] [--only decode,prefill,layers] [--threads 2]

The only part of loadtest that imports an internal module: engine.executor.ops (tests/test_borders.py).
"""
