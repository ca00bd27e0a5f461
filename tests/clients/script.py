"""What the scripted model writes, and what programs must make of it.  No imports of ours: clients read it, too."""

from __future__ import annotations

import json
import re
from typing import Any

MODEL = "scripted"
FINAL = "The file says: kiwi."  # what the tool wrote is in the answer only if the tool really ran
COMMAND = "echo kiwi > made.txt && cat made.txt"
# Tools that run a command, as programs name them -> arguments of the call.
SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "Write a file"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "run_shell": {"command": COMMAND},
}
OBJECTS: dict[str, Any] = {"title": "Make a file", "ages": {"ann": "7"}}  # answers to schemas with such a property


def answer(prompt: str, grammar: str) -> str:
    """Return what the model writes after a prompt of ChatML; `grammar`: what the answer must match, if anything."""
    last = [turn for turn in prompt.split("<|im_start|>") if turn.startswith(("user", "tool"))][-1]
    if last.startswith("tool"):
        return FINAL if "kiwi" in last else "The tool has failed."
    for property_name, value in OBJECTS.items():
        if f'"{property_name}"' in grammar:
            return json.dumps({property_name: value})
    offered = re.findall(r'"name": "(\w+)"', prompt)
    name = next((name for name in SHELLS if name in offered), None)
    if name is None:
        return FINAL
    call = json.dumps({"name": name, "arguments": SHELLS[name]})
    return f"<think>\nI need the tool {name}.\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"
