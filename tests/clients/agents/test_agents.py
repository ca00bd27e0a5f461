"""Agents of pydantic-ai and smolagents: a tool that runs a command, its result, the answer, another turn."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIModel, Tool, ToolCallingAgent

from tests.clients.script import FINAL, MODEL

URL = f"{os.environ['QUIRE_SCRIPTED_URL']}/v1"


def run_in(folder: Path, command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, check=True).stdout


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(kind: Any, tmp_path: Path) -> None:
    agent = Agent(kind(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none")))

    @agent.tool_plain
    def run_shell(command: str) -> str:
        """Run a command."""
        return run_in(tmp_path, command)

    first = await agent.run("Make the file")
    assert first.output == FINAL
    assert (tmp_path / "made.txt").read_text() == "kiwi\n"
    assert (await agent.run("Again", message_history=first.all_messages())).output == FINAL
    async with Agent(agent.model).run_stream("Hello") as stream:  # with a tool it would end at the first text
        assert await stream.get_output() == FINAL


class Shell(Tool):  # type: ignore[misc]
    """Runs a command in one folder."""

    name = "run_shell"
    description = "Runs a command."
    inputs: ClassVar = {"command": {"type": "string", "description": "the command"}}
    output_type = "string"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, command: str) -> str:
        return run_in(self.folder, command)


def test_smolagents(tmp_path: Path) -> None:
    """Its tools end a run by a call of `final_answer`, which the script does not know: the tool call is what counts."""
    model = OpenAIModel(model_id=MODEL, api_base=URL, api_key="none")
    agent = ToolCallingAgent(tools=[Shell(tmp_path)], model=model, max_steps=1)
    agent.run("Make the file")
    assert (tmp_path / "made.txt").read_text() == "kiwi\n"
