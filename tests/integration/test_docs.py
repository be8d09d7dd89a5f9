"""The pages of the documentation: commands are read and accepted, links lead somewhere.

`tests/e2e/test_pages.py` runs the commands.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from benchmarks.pictures import FOLDER, PICTURES
from mkdocs.commands.build import build
from mkdocs.config import load_config
from tests.pages import PAGES, ROOT, code_blocks, commands, write_shown_files

import winnow
from winnow.cli.main import app
from winnow.cli.sweep import plan_sweep
from winnow.config.files import resolve_evaluation_recipe
from winnow.config.load import parse_recipe
from winnow.errors import WinnowError

COMMAND: Any = typer.main.get_command(app)


@cache
def refused(*words: str) -> str:
    """What is wrong with a command; empty where it is accepted. Nothing is run."""
    command, rest = COMMAND, list(words)
    context = command.make_context("winnow", rest)
    try:
        while hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
            context = command.make_context(name, rest, parent=context)
        given = context.params
        if given.get("recipe") and "overrides" in given and not given.get("help_config"):
            recipe = given["recipe"].replace("RECIPE", "gsm8k")
            if context.info_name == "eval":
                recipe = resolve_evaluation_recipe(recipe)
            elif recipe.endswith((".yaml", ".yml")) and not Path(recipe).exists():
                recipe = "gsm8k"  # the reader's file
            if given.get("multirun"):
                several = plan_sweep(recipe, given["overrides"])
                assert len(several.runs) > 1
            else:
                parse_recipe(recipe, given["overrides"] or [])
    except (WinnowError, typer.BadParameter.__base__) as error:  # type: ignore[misc]
        return str(error) or repr(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    write_shown_files(text, tmp_path)
    refused.cache_clear()  # files of one name differ between pages
    faults = {shlex.join(words): refused(*words) for words in commands(text)}
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is_and_commands_stand_in_shell_blocks(page: Path) -> None:
    text = page.read_text("utf-8")
    assert not re.findall(r"(?<=\n\n) {4}(?:\.venv/bin/)?(?:winnow|make|pip) .*", text)
    for kind, block in code_blocks(text):
        assert kind in ("sh", "text", "python", "yaml"), block
        has_command = re.search(r"^(\.venv/bin/)?(winnow|make|pip) ", block, re.MULTILINE)
        assert kind == "sh" or not has_command, block


def test_the_site_is_built_and_no_link_is_broken(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    build(config)
    search = (tmp_path / "search/search_index.json").read_text("utf-8")
    assert '"settings/rollout/#rollout.max_response_tokens"' in search
    assert '"settings/algorithm/#algorithm.policy_loss.gspo"' in search
    python = (tmp_path / "python/index.html").read_text("utf-8")
    headings = re.findall(r"<h2[^>]* class=\"doc doc-heading\">\s*(?:<[^>]+>)?(\w+)", python)
    assert set(headings) >= {*winnow.__all__}
    algorithms = (tmp_path / "algorithms/index.html").read_text("utf-8")
    assert "<mfrac><mrow><mi>R</mi>" in algorithms
    pages = [page.read_text("utf-8") for page in tmp_path.rglob("*.html")]
    assert not any("arithmatex" in page for page in pages)
    assert not any(
        re.findall(r"(?:src|href)=\"(?:https?:)?//[^\"]+\.(?:js|css|woff2?)", page)
        for page in pages
    )


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws_and_stands_on_a_page(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert drawn == (FOLDER / f"{name}.svg").read_text("utf-8"), "python -m benchmarks.pictures"
    shown = [page for page in PAGES if f"](pictures/{name}.svg)" in page.read_text("utf-8")]
    assert len(shown) == 1


def test_the_examples_for_schedulers_hold_together() -> None:
    examples = ROOT / "examples"
    script = examples / "slurm/train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    typed = re.search(r"winnow train \"\$@\" ([\s\S]*?) &\n", script.read_text())
    assert typed is not None
    text = re.sub(r"\$\(\([^)]*\)\)|\"?\$\w+\"?", "2", typed[1].replace("\\\n", " "))
    text = text.replace('"2:2"', "h:2").replace('"slurm-2', "slurm").replace('"', "")
    assert refused("train", "dapo-math", *shlex.split(text)) == ""

    job = yaml.safe_load((examples / "kuberay/rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "winnow"
    assert refused(*words) == ""
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    asked = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    needed = int(asked["trainer.strategy.ranks"]) + int(asked["rollout.engine.processes"])
    assert needed == group["replicas"] * int(gpus)

    docker = (examples / "docker/Dockerfile").read_text()
    copied = re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", docker)
    known = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
