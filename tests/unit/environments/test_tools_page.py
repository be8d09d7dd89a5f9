"""The tools of docs/tools.md, called as a policy calls them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.pages import ROOT, code_blocks

from winnow.environments.calls import parse_turn
from winnow.environments.tools import ToolEnvironment, tool_schema
from winnow.errors import ConfigError
from winnow.user_code import load_user_object

CORPUS = ("The Nile flows through Egypt.", "Chad lies in Africa.", "The river Chari is in Chad.")
ROW = {"lookup": {"create_kwargs": {"facts": {"Chad": "N'Djamena"}}}}


@pytest.mark.parametrize(
    ("name", "arguments", "text", "reward"),
    [
        ("calc", {"expression": "37*48"}, "1776", 0.0),
        ("lookup", {"key": "Chad"}, "N'Djamena", -0.01),
        ("search", {"query": "rivers: which river in Chad?", "results": 2}, None, 0.0),
        ("search", {"query": "Peru"}, "nothing found", 0.0),
    ],
)
def test_the_pages_tools_have_schemas_and_answer(name, arguments, text, reward, tmp_path: Path):
    page = (ROOT / "docs/tools.md").read_text("utf-8")
    (code,) = [code for kind, code in code_blocks(page) if kind == "python" and name in code]
    (tmp_path / f"{name}.py").write_text(code)
    lines = (json.dumps({"text": text}) + "\n" for text in CORPUS)
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    tool = load_user_object(f"{tmp_path}/{name}.py:{name}", "environment.tools", ConfigError)
    assert tool_schema(tool)["function"]["name"] == name
    environment = ToolEnvironment([tool], 10, 4096)
    environment.reset({"extra_info": {"tools_kwargs": ROW}})
    call = json.dumps({"name": name, "arguments": arguments})
    step = asyncio.run(environment.step(parse_turn(f"<tool_call>{call}</tool_call>")))
    expected = "\n\n".join((CORPUS[2], CORPUS[1])) if text is None else text
    assert (step.observation[0]["content"], step.reward) == (expected, reward)
