"""A29 on a real engine: the time between tokens of 32 sequences while a prompt of 32k tokens is computed beside them.

    python -m loadtest.long_prompt DIR [--tokens 32768] [--steps 60]

The 42M model with a context of CONTEXT tokens is made in DIR where there is none.  All of the prompt takes minutes on a
CPU: so many steps are measured at each quarter of it, after as many without it, and between them it is computed as fast
as can be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from loadtest import machine
from loadtest.checkpoint import make_llama_42m

CONTEXT = 40_000
AIM = 2.0  # p99 beside the prompt, over p99 alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if not (options.directory / "config.json").exists():
        make_llama_42m(options.directory, CONTEXT)
    asked = ["--long-prompt", str(options.tokens), "--long-prompt-steps", str(options.steps), "--kv-blocks", "6000"]
    command = [sys.executable, "-m", "engine.tools", "bench", str(options.directory), *asked]
    said = subprocess.run(command, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = {name: round(value, 3) for name, value in json.loads(said).items() if name != "first_token_at"}
    print(json.dumps(figures, indent=1))
    print(f"p99 beside the prompt {figures['beside_p99_over_alone_p99']} times that alone (aim {AIM})")
    settings = f"--tokens {options.tokens} --steps {options.steps}"
    path = machine.write("long_prompt_cpu", f"python -m loadtest.long_prompt DIRECTORY {settings}", figures)
    print(f"written to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
