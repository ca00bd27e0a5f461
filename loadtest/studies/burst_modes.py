"""The command `burst` with other servers' admission modes among its systems: watermark, reserve and none.

    python -m quire.loadtest.studies burst-modes DIR --systems lanes,threshold,watermark,reserve,none

The options and results are those of `python -m quire.loadtest burst`; the study `baselines` describes the modes.
"""

from __future__ import annotations

import argparse
from functools import partial

from quire.loadtest import burst
from quire.loadtest.server import serve

serve_baseline = partial(serve, program=("quire.loadtest.studies", "baselines"))  # `quire serve` that knows the modes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    burst.add_arguments(parser, burst.MODES | dict.fromkeys(("watermark", "reserve", "none"), serve_baseline))


main = burst.main
