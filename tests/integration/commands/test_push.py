"""`winnow export --push`: the hub's own client against a server on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from tests.hubs import Hub
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_this_process

from winnow.commands.push import model_card
from winnow.config.load import load_recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run `demo` that has imitated for two steps."""
    folder = tmp_path_factory.mktemp("home")
    digits_folder(folder / "base")
    rows = [json.dumps({"prompt": f"{n}:", "completion": f"#{n}"}) for n in range(20)]
    (folder / "demos.jsonl").write_text("\n".join(rows))
    in_this_process(
        *("sft", "sft", "model.path=base", "sft.train_files=[demos.jsonl]", "run.name=demo"),
        *("sft.eval_files=[demos.jsonl]", "trainer.steps=2", "run.threads=1"),
        folder=folder,
    ).check()
    return folder


def export(home: Path, hub: Hub, name: str, *words: str, token: str = "write") -> Outcome:
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    return in_this_process(
        *("export", "runs/demo", name, "--push", *words), folder=home, environment=environment
    )


def test_a_model_is_pushed_whole_with_a_card(home: Path, hub: Hub) -> None:
    said = export(home, hub, "out", "owner/demo", "--private", "--revision", "v2").check()
    assert "Pushed to" in said.out
    assert hub.made == {"owner/demo": {"visibility": "private", "branches": ["v2"]}}
    pushed = hub.repos["owner/demo"]
    files = {p.name: p.read_bytes() for p in (home / "out").iterdir()}
    assert pushed == files
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
    card = pushed["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "Step 2 of 2, by imitation of demonstrations",
        "| start | base |",
        "| training data | demos.jsonl |",
        "| optim.lr | 1e-05 |",
        "| Held-out figure | step 0 | step 2 |",
        "| sft/held_out_loss | 3.",
    ):
        assert part in card, part
    assert str(home) not in card


def test_a_push_that_breaks_off_says_how_to_go_on_and_a_taken_folder_makes_no_repository(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(HfApi, "upload_folder", HfApi.dataset_info)  # takes no such arguments
        told = export(home, hub, "half", "owner/half", "--revision", "v2")
    assert told.code == 2
    assert "the model is in half; retry with `hf upload owner/half half --revision v2`" in told.err
    assert (home / "half" / "README.md").is_file()
    told = export(home, hub, "half", "owner/other")
    assert "half already exists; choose another folder" in told.err
    assert "owner/other" not in hub.made


def test_a_card_names_data_on_the_hub_in_full_and_local_files_without_their_folder() -> None:
    files = "data.train_files=[hf://datasets/openai/gsm8k/main/train, /home/me/own.jsonl]"
    config = load_recipe("gsm8k", ["model.path=/home/me/base", files])
    card = model_card(config, 3, [], Path("none"))
    assert "| training data | hf://datasets/openai/gsm8k/main/train, own.jsonl |" in card
    assert "/home/me" not in card


@pytest.mark.parametrize(
    ("token", "repo", "said"),
    [
        ("gone", "owner/demo", "the hub cannot be reached: "),
        ("", "owner/demo", "the hub requires a valid token; set HF_TOKEN, or run"),
        ("read", "owner/demo", "the token has no write access; use one that has"),
        ("write", "a/b/c", "use OWNER/NAME"),
    ],
)
def test_what_the_hub_refuses_costs_one_line_and_nothing_is_written(
    home: Path, hub: Hub, token: str, repo: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token == "gone":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = export(home, hub, "none", repo, token=token)
    assert told.code == 2
    (line,) = told.err.splitlines()
    assert line.startswith(f"winnow: --push {repo}: ")
    assert said in line
    assert not (home / "none").exists()
