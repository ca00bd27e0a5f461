"""`python -m quire.engine.process.rank COMMANDS LIFE FORMAT`: the process of a tensor-parallel rank other than 0.

`executor/ranks/parallel.py` starts it.  COMMANDS and LIFE are file descriptors of inherited sockets; FORMAT is the log
format.  Rank 0 sends the engine's options over the first socket.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from multiprocessing.connection import Connection

from quire.engine.common import logs, open_files
from quire.engine.process.interpreter import tune_interpreter
from quire.engine.process.standby import without_optional_packages


def main(commands: int, life: int, form: logs.Format) -> int:
    """Run a rank until it ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal also sends SIGINT to rank 0, which then drains
    logs.start(form)
    open_files.raise_limit()
    tune_interpreter()
    with without_optional_packages():
        from quire.engine.executor.ranks import rank_process  # imports torch
    return rank_process.serve(Connection(commands), rank_process.Life(socket.socket(fileno=life)))


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), "json" if sys.argv[3] == "json" else "text")
    logging.shutdown()
    sys.exit(status)
