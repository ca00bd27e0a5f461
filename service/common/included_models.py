"""Models that Quire makes by itself: `demo` and `builtin` stand for a directory that is made on first use."""

from __future__ import annotations

import subprocess

from quire.engine.common import child_python
from quire.engine.common.embedded_redis import die_with_parent

# Value of MODEL -> module that makes the directory and prints its path, in a child process, since it may need torch.
INCLUDED = {
    "": ["quire.engine.executor.models.sources.demo", "--or-builtin"],
    "demo": ["quire.engine.executor.models.sources.demo"],
    "builtin": ["quire.engine.executor.models.sources.builtin"],
}


def find_model(name: str) -> str:
    """Return the directory of the demo or built-in model, created on first use; any other name unchanged.

    Ends the process if the directory cannot be created; the reason is then on stderr."""
    if name not in INCLUDED:
        return name
    made = subprocess.run(
        child_python.command("-m", *INCLUDED[name]),
        stdout=subprocess.PIPE,
        env=child_python.environment(),
        text=True,
        check=False,
        preexec_fn=die_with_parent(),
    )
    if made.returncode != 0:
        raise SystemExit(made.returncode)
    return made.stdout.strip().splitlines()[-1]
