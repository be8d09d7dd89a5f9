"""Which folder a run gets, what it continues, and what is cut back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.unprivileged import permissions_apply

from winnow.checkpoints import checkpoint
from winnow.checkpoints.checkpoint import (
    Checkpoint,
    Manifest,
    Snapshot,
    _sha256,
    checkpoints_in,
    newest_usable,
    save_checkpoint,
    verify,
    verify_rank_share,
)
from winnow.checkpoints.opening import OpenedRun, opened_run, pin_microbatch_tokens, rewind
from winnow.checkpoints.recipe_changes import check_same
from winnow.config.files import recorded_recipe
from winnow.config.load import dump_config, load_recipe
from winnow.config.root import Config
from winnow.config.rules import config_warnings
from winnow.errors import CheckpointError, ConfigError, WinnowError
from winnow.observe.jsonl import MetricsLog

STEPS = 8


def recipe(folder: Path, *overrides: str, name: str = "a") -> Config:
    settings = [f"trainer.steps={STEPS}", f"run.dir={folder}", "optim.warmup_steps=0"]
    return load_recipe("quickstart", [*settings, f"run.name={name}", *overrides])


def run_to(folder: Path, step: int, *overrides: str) -> Path:
    """A run with files of its steps and a checkpoint every two of them."""
    config = recipe(folder, *overrides)
    with opened_run(config, "quickstart") as opened:
        run = opened.folder
        log = MetricsLog(run.metrics)
        for path in (run.ledger, run.rollouts, run.evaluations):
            path.mkdir()
        for number in range(1, step + 1):
            run.rollout_file(number).touch()
            (run.ledger / run.rollout_file(number).name).touch()
            log.log(number, {"x": number})
            if number % 2 == 0:
                run.eval_file(number).touch()
                save(run.path, number, config=dump_config(opened.config), offset=log.size)
        log.close()
    return run.path


def save(
    run: Path,
    step: int,
    *,
    config: str,
    offset: int,
    evaluated: bool = True,
    state: dict[str, Any] | None = None,
) -> Checkpoint:
    manifest = Manifest(step, evaluated, metrics_bytes=offset, machine={"threads": 1})
    snapshot = Snapshot(state or {}, lambda model: model.mkdir())
    return save_checkpoint(run / "checkpoints", manifest, snapshot, config)


def open_again(config: Config) -> OpenedRun:
    with opened_run(config, "quickstart") as opened:
        return opened


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_name_is_a_new_run_as_is_each_without_a_name(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    opened = open_again(config)
    assert (opened.folder.path, opened.checkpoint) == (tmp_path / "a", None)
    assert load_recipe(str(opened.folder.config)) == config
    assert recorded_recipe(opened.folder.config.read_bytes()) == "quickstart"
    config = load_recipe("quickstart", [f"run.dir={tmp_path}"])
    first, second = open_again(config), open_again(config)
    assert first.folder.path != second.folder.path


def test_a_run_is_finished_once_its_last_evaluation_is_there_and_one_that_comes_again_is_dropped(
    tmp_path: Path,
) -> None:
    run = run_to(tmp_path, STEPS)
    assert open_again(recipe(tmp_path)).is_finished(STEPS)
    save(run, STEPS, config=(run / "config.yaml").read_text(), offset=0, evaluated=False)
    opened = open_again(recipe(tmp_path))
    assert not opened.is_finished(STEPS)
    rewind(
        opened.folder,
        opened.manifest,
        MetricsLog(opened.folder.metrics),
        dump_config(opened.config),
    )
    assert names(run / "eval") == [f"step-{step}.parquet" for step in (2, 4, 6)]
    assert len(names(run / "rollouts")) == STEPS


def test_keys_that_no_figure_depends_on_may_change(tmp_path: Path) -> None:
    overrides = (
        *("observe.console=off", "run.threads=1", "trainer.save_every=3", "trainer.keep_last=7"),
        *("trainer.max_restarts=5", "trainer.stall_timeout_s=9", "sampling.on_bound=stop"),
        *("warm_start.cache_dir=elsewhere", "trainer.steps=9", "evaluation.every=1"),
        *("evaluation.n=3", "observe.rollout_text_groups=1", "data.eval_files=[new.jsonl]"),
        *("observe.sinks=[{path: mine.py:Table}]", "observe.tracking.project=mine"),
        *("observe.trackers=[mlflow]", "observe.mlflow.uri=x"),
    )
    run_to(tmp_path, 5)
    opened = open_again(recipe(tmp_path, *overrides))
    assert opened.checkpoint is not None
    told = [note for note in opened.notes if " was " in note]
    assert all(" is " in note and note.endswith(" from now on") for note in told)
    keys = {override.partition("=")[0] for override in overrides}
    # Threads are told with the machine.
    assert {note.partition(" was ")[0] for note in told} == keys - {"run.threads"}


def test_keys_that_figures_depend_on_may_not_change(tmp_path: Path) -> None:
    saved = recipe(tmp_path)
    for override in (
        *("model.dtype=bfloat16", "warm_start.lr=1", "data.max_prompt_tokens=9", "run.seed=1"),
        *("reward.on_failure=wrong", "reward.weights={task: 2}", "rollout.temperature=0.9"),
        *("sampling.lookahead=0.5", "sampling.groups_per_step=32", "algorithm/kl/reward=fixed"),
        *("trainer.mini_batch_groups=2", "trainer.epochs=2", "trainer.microbatch_tokens=99"),
        *("optim.lr=1", "run.deterministic=false", "run.fork=runs/other", "data.shuffle=false"),
        *("critic/strategy=fsdp2", "rollout.routing_replay=true", "trainer/mode=one_step_off"),
    ):
        key = override.partition("=")[0].replace("/", ".")
        with pytest.raises(
            ConfigError, match=rf"another recipe: {re.escape(key)}.* was .* and is "
        ):
            check_same(recipe(tmp_path, override), saved, "a", "set it back")


def test_a_run_keeps_the_default_of_micro_batches_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = "trainer.microbatch_tokens=null"
    run_to(tmp_path, 2, default, "run.device=cpu")
    older = run_to(tmp_path, 2, "trainer.microbatch_tokens=16384", "run.name=b")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # another machine
    for name, tokens in ("a", 1024), ("b", 16384):
        opened = open_again(recipe(tmp_path, default, name=name))
        assert opened.config.trainer.microbatch_tokens == tokens
        assert [note for note in opened.notes if "microbatch" in note] == []
    forked = open_again(recipe(tmp_path, default, f"run.fork={older}", name="c"))
    assert forked.config.trainer.microbatch_tokens == 16384
    for tokens, settings in (
        (16384, []),
        (1024, ["run.device=cpu"]),
        (16384, ["cluster=ray", "trainer/strategy=fsdp2"]),
        (99, ["trainer.microbatch_tokens=99"]),
    ):
        config = pin_microbatch_tokens(recipe(tmp_path, default, *settings))
        assert config.trainer.microbatch_tokens == tokens
    pinned = load_recipe(
        "quickstart", ["trainer.microbatch_tokens=1024", "data.max_prompt_tokens=2000"]
    )
    assert config_warnings(pinned) == []  # nobody chose 1,024


@pytest.mark.parametrize("given", ["{run}/", "a@2", "{run}/checkpoints/step-2", None])
def test_a_fork_goes_on_by_the_same_command_however_its_origin_was_named(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_to(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    fork = [] if given is None else [f"run.fork={given.format(run=run)}"]
    first = open_again(recipe(tmp_path, *(fork or [f"run.fork={run}"]), name="b"))
    assert first.config.run.fork == f"{'a' if given and given[0] == 'a' else run}@2"
    assert [note for note in first.notes if " was " in note] == []
    again = recipe(tmp_path, *fork, name="b")
    if given is None:
        with pytest.raises(ConfigError, match=r"run\.fork was '.*a@2' and is null"):
            open_again(again)
        return
    opened = open_again(again)
    assert opened.checkpoint is not None
    assert opened.checkpoint.path == tmp_path / "b/checkpoints/step-2"
    with pytest.raises(ConfigError, match=r"run\.fork was '.*a@2' and is '.*a@1'"):
        open_again(recipe(tmp_path, f"run.fork={run}@1", name="b"))


def test_steps_of_passes_over_the_data_are_known_only_while_what_they_follow_from_stays(
    tmp_path: Path,
) -> None:
    one, two = "trainer.data_epochs=1", "trainer.data_epochs=2"
    run = run_to(tmp_path, STEPS, one)
    assert open_again(recipe(tmp_path, one, "trainer.steps=3")).is_finished(STEPS)
    longer = open_again(recipe(tmp_path, two, "trainer.steps=3"))
    assert not longer.is_finished(STEPS)
    assert [note for note in longer.notes if " was " in note] == [
        "trainer.data_epochs was 1.0 and is 2.0 from now on"
    ]
    save(run, STEPS, config=(run / "config.yaml").read_text(), offset=0, state={"sampler": None})
    with pytest.raises(
        CheckpointError, match=r"predates the tracking of epochs; set trainer\.data"
    ):
        open_again(recipe(tmp_path, one)).load_state(recipe(tmp_path, one))
    fork = one, "sampling.groups_per_step=32", "trainer.mini_batch_groups=32", f"run.fork={run}"
    assert not open_again(recipe(tmp_path, *fork, "trainer.steps=3", name="b")).is_finished(STEPS)


def test_where_processes_are_and_how_many_train_may_change(tmp_path: Path) -> None:
    on_ranks = "trainer/strategy=fsdp2", "rollout.engine.processes=1"
    run_to(tmp_path, 5, *on_ranks)
    ray = "cluster=ray", "cluster.address=auto", "cluster.environment={NCCL_DEBUG: INFO}"
    pools = "cluster.pools={t:{per_node:4},g:{cpus:2}}", "cluster.roles={policy:t,rollout:g}"
    more = recipe(tmp_path, *on_ranks, *ray, *pools, "trainer.strategy.ranks=4")
    assert open_again(more).checkpoint is not None
    with pytest.raises(ConfigError, match=r"trainer\.strategy\.name was 'fsdp2' and is 'single'"):
        open_again(recipe(tmp_path, "rollout.engine.processes=1"))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.processes was 1 and is 2"):
        open_again(recipe(tmp_path, *on_ranks, "rollout.engine.processes=2"))


def test_the_strategy_of_ranks_may_change_and_is_told(tmp_path: Path) -> None:
    apart = "rollout.engine.processes=1"
    cut = "trainer/strategy=megatron", "trainer.strategy.tensor=2", apart
    run = run_to(tmp_path, 5, "trainer/strategy=fsdp2", "trainer.strategy.sequence=2", apart)
    for config in (
        recipe(tmp_path, *cut, "trainer.strategy.ranks=4"),
        recipe(tmp_path, *cut, "trainer.strategy.ranks=4", f"run.fork={run}", name="b"),
    ):
        notes = [note.removesuffix(" from now on") for note in open_again(config).notes]
        assert [note for note in notes if note.startswith("trainer.strategy.")] == [
            "trainer.strategy.name was 'fsdp2' and is 'megatron'",
            "trainer.strategy.ranks was 2 and is 4",
        ]
    with pytest.raises(ConfigError, match=r"trainer\.strategy\.name was 'fsdp2' and is 'single'"):
        open_again(recipe(tmp_path, apart, f"run.fork={run}", name="c"))


@pytest.mark.parametrize(
    "left",
    [
        ["log.txt"],
        [".lock", "log.txt", "config.yaml.partial"],
        ["log.txt", "config.yaml", "trackers/wandb.json", "trackers/wandb/offline-run/a.wandb"],
    ],
)
def test_a_run_that_died_before_it_had_a_recipe_is_begun_again(
    left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name in left:
        file = tmp_path / "a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert open_again(recipe(tmp_path)).checkpoint is None
    assert not {"config.yaml.partial", "trackers"} & {*names(tmp_path / "a")}


def test_a_run_without_a_checkpoint_begins_at_the_beginning(tmp_path: Path) -> None:
    run = run_to(tmp_path, 1)
    opened = open_again(recipe(tmp_path))
    assert opened.checkpoint is None
    assert "no checkpoint yet" in opened.notes[0]
    log = MetricsLog(opened.folder.metrics)
    rewind(opened.folder, opened.manifest, log, dump_config(opened.config))
    assert names(run / "rollouts") == []
    assert (run / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("which", ["newest", "named"])
def test_files_are_checked_once(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = run_to(tmp_path, 6), list[str]()

    def note(path: Path) -> str:
        read.append(path.name)
        return _sha256(path)

    monkeypatch.setattr(checkpoint, "_sha256", note)
    given = {"newest": "auto", "named": f"{run}/checkpoints/step-6"}[which]
    config = recipe(tmp_path, f"run.resume={given}")
    open_again(config).load_state(config)
    assert sorted(read) == ["config.yaml", "state.json", "state.safetensors"]


SHARDS = {f"ranks/__{i}_0.distcp": 1000 + i for i in range(5)} | {"model/model.safetensors": 2500}


def test_ranks_check_what_they_read_as_many_bytes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(draft: Path) -> dict[str, Any]:
        for name, size in {**SHARDS, "model/config.json": 9}.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(bytes(size))
        return {}

    saved = save_checkpoint(tmp_path / "checkpoints", Manifest(1), Snapshot({}, _none, write))
    read: dict[int, list[str]] = {rank: [] for rank in range(3)}
    for rank, names in read.items():

        def note(path: Path, names: list[str] = names) -> str:
            names.append(str(path.relative_to(saved.path)))
            return _sha256(path)

        monkeypatch.setattr(checkpoint, "_sha256", note)
        verify_rank_share(saved.path, rank, 3)
    assert sorted(chain(*read.values())) == sorted(SHARDS)
    loads = [sum(SHARDS[name] for name in names) for names in read.values()]
    assert max(loads) - min(loads) <= 1004
    shard = saved.path / "ranks/__3_0.distcp"
    shard.write_bytes(b"?" * 1003)
    assert newest_usable(tmp_path, rank_folders=["ranks"])[0] == saved
    (owner,) = (rank for rank, names in read.items() if "ranks/__3_0.distcp" in names)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp is damaged"):
        verify_rank_share(saved.path, owner, 3)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp is damaged"):
        verify(saved)
    shard.write_bytes(b"?" * 1002)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp is damaged"):
        newest_usable(tmp_path, rank_folders=["ranks"])


def _none(folder: Path) -> None:
    """Write nothing."""


@pytest.mark.parametrize("which", ["run", "checkpoint", "relative", "slash"])
def test_a_path_continues_that_run(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_to(tmp_path, 6)
    monkeypatch.chdir(run / "checkpoints")
    path = {"run": run, "checkpoint": run / "checkpoints/step-2", "relative": "step-2"}
    given = path.get(which, f"{run}/")
    opened = open_again(recipe(tmp_path, f"run.resume={given}", "run.name=null"))
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == (6 if which in ("run", "slash") else 2)
    assert opened.folder.path.resolve() == run


def test_what_is_later_than_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    run = run_to(tmp_path, 7)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "half')
    (run / "rollouts" / "step-8.parquet.partial").touch()
    (run / "ledger.parquet-8.partial").touch()
    (run / "checkpoints" / ".step-8.partial").mkdir()
    shutil.rmtree(run / "checkpoints" / "step-6")
    opened = open_again(recipe(tmp_path))
    log = MetricsLog(opened.folder.metrics)
    rewind(opened.folder, opened.manifest, log, dump_config(opened.config))
    assert [c.step for c in checkpoints_in(run / "checkpoints")] == [2, 4]
    assert names(run / "checkpoints") == ["step-2", "step-4"]
    for folder in ("rollouts", "ledger.parquet"):
        assert names(run / folder) == [f"step-{step}.parquet" for step in (1, 2, 3, 4)]
    assert not list(run.glob("*.partial"))
    assert names(run / "eval") == ["step-2.parquet", "step-4.parquet"]
    assert (run / "metrics.jsonl").read_text().count("\n") == 4


def test_another_machine_is_told_apart(tmp_path: Path) -> None:
    run_to(tmp_path, 4)
    opened = open_again(recipe(tmp_path))
    assert opened.manifest.machine_changes({"threads": 1, "torch": "9"}) == []
    assert opened.manifest.machine_changes({"threads": 2}) == [
        "Warning: threads changed from 1 to 2: results may differ in the last bits"
    ]


def without(mode: int, *names: str, left: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Make what a crash may have left in a run, then set the mode of parts of the run."""

    def spoil(run: Path) -> None:
        for name in left:
            (run / name).mkdir() if "step" in name else (run / name).touch()
        for name in names:
            (run / name).chmod(mode)

    return spoil


def half_replaced(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-4").rename(folder / ".step-4.replaced")
    folder.chmod(0o500)


def begun(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / "log.txt").touch()
    (run / ".lock").touch()
    run.chmod(0o500)


REFUSED = {
    "all runs": (without(0, ".."), "cannot use {run}: "),
    "the checkpoints' entries": (
        without(0o400, "checkpoints"),
        "{run} has no intact checkpoint: {run}/checkpoints/step-4/manifest.json",
    ),
    "the checkpoint's recipe": (
        without(0, "checkpoints/step-4/config.yaml", "checkpoints/step-2/config.yaml"),
        "{run} has no intact checkpoint: {run}/checkpoints/step-4/config.yaml",
    ),
    "a checkpoint to be put back": (half_replaced, "cannot use {run}/checkpoints/.step-4.replaced"),
    "a file half written": (
        without(0o500, ".", left=("curve.png.partial",)),
        "cannot use {run}/curve.png.partial",
    ),
    "a folder that was only begun": (begun, "cannot use {run}/log.txt"),
}


@pytest.mark.parametrize(("spoil", "said"), REFUSED.values(), ids=REFUSED)
def test_what_may_not_be_read_or_changed_is_named_in_one_line(
    spoil: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    run = run_to(tmp_path / "runs", 4)
    spoil(run)
    try:
        with permissions_apply(), pytest.raises(WinnowError) as caught:
            open_again(recipe(run.parent))
    finally:
        for path in (run.parent, run, run / "checkpoints"):
            path.chmod(0o700) if path.is_dir() else None
    message = str(caught.value)
    assert message.startswith(said.format(run=run)), message
    assert "Permission denied" in message
    assert "; " in message
    assert "\n" not in message


def test_a_draft_that_cannot_be_deleted_keeps_no_run_from_being_opened(tmp_path: Path) -> None:
    run = run_to(tmp_path, 4)
    without(0o500, "checkpoints", left=("checkpoints/.step-8.partial",))(run)
    try:
        with permissions_apply():
            opened = open_again(recipe(tmp_path))
    finally:
        (run / "checkpoints").chmod(0o700)
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == 4


def test_a_folder_that_is_given_up_is_free_for_the_next(tmp_path: Path) -> None:
    run = run_to(tmp_path, 4)
    with pytest.raises(ConfigError, match="another recipe"):
        open_again(recipe(tmp_path, "rollout.n=4"))
    assert open_again(recipe(tmp_path)).folder.path == run
