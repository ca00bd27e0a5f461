"""How fast the kernels are, each compared with the least time that its bytes or operations need on this machine.

    python -m quire.loadtest.kernels [--quick] [--only decode,prefill,layers] [--threads 2]

The only part of loadtest that imports an internal module: engine.executor.ops (tests/test_borders.py).
"""
