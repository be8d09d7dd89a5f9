"""A model on the hub: uploaded by the hub's client, with a card of its recipe, data and figures.

The token is the client's: `HF_TOKEN`, or that of `hf auth login`. `HF_ENDPOINT` names another hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from winnow.config.files import to_yaml
from winnow.config.root import Config
from winnow.data.hub import is_on_hub
from winnow.errors import WinnowError
from winnow.evaluation.compare import parse_answers
from winnow.evaluation.statistics import mean_of
from winnow.models.fetch import brief, may_be_hub_name
from winnow.observe.metrics import HELD_OUT_LOSS, Record
from winnow.observe.rollouts import list_step_files, read_rollouts
from winnow.version import __version__

_SETTINGS = (
    *("algorithm.advantage.name", "algorithm.policy_loss.name", "algorithm.aggregation"),
    *("sampling.groups_per_step", "rollout.n", "rollout.max_response_tokens"),
)
_OF_BOTH = ("model.adapter.name", "model.dtype", "optim.lr", "optim.schedule", "run.seed")
_OF_SFT = ("sft.batch_size", "sft.max_tokens", "sft.turns")


@dataclass(frozen=True)
class HubTarget:
    """A repository on the hub to upload a model to."""

    repo: str
    private: bool = False
    """True makes a new repository a private one."""
    revision: str | None = None
    """Branch to upload to, made if it is not there; None is the main one."""

    def prepare(self) -> None:
        """Create the repository and the branch if they do not exist.

        Raises:
            WinnowError: the hub refuses, or cannot be reached.
        """
        from huggingface_hub import HfApi

        with self._explain_refusals("nothing was written"):
            HfApi().create_repo(self.repo, private=self.private or None, exist_ok=True)
            if self.revision is not None:
                HfApi().create_branch(self.repo, branch=self.revision, exist_ok=True)

    def upload(self, folder: Path, card: str) -> str:
        """Upload a model's folder with its card; returns the address of the commit.

        Raises:
            WinnowError: the hub refuses, or cannot be reached.
        """
        from huggingface_hub import HfApi

        (folder / "README.md").write_text(card, encoding="utf-8")
        branch = f" --revision {self.revision}" if self.revision else ""
        again = f"`hf upload {self.repo} {folder}{branch}`"
        with self._explain_refusals(f"the model is in {folder}; retry with {again}"):
            done = HfApi().upload_folder(
                repo_id=self.repo,
                folder_path=folder,
                revision=self.revision,
                commit_message=f"Upload with winnow {__version__}",
            )
        return str(done.commit_url)

    @contextlib.contextmanager
    def _explain_refusals(self, state: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the client's own, or of the HTTP library below
            raise WinnowError(f"--push {self.repo}: {_reason(error)}; {state}") from error


def model_card(
    config: Config,
    step: int,
    records: Sequence[Record],
    evaluations: Path,
    quantized: str | None = None,
) -> str:
    """Write a model card: settings, data, versions, and held-out metrics before and after.

    Local paths are cut to their names.

    Args:
        records: the run's lines of figures, in order.
        evaluations: folder of the run's held-out answers.
        quantized: the types that the weights at the start were dequantised from.
    """
    imitates = config.sft.name != "none"
    base = config.model.path or "a model made by the recipe"
    is_on_hub = may_be_hub_name(base) and not Path(base).exists()
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["winnow", "sft" if imitates else "reinforcement-learning"]
    head |= {"base_model": base} if is_on_hub else {}
    files = getattr(config.sft, "train_files", ()) if imitates else config.data.train_files
    data = [_public_name(file) for file in files] or [config.data.task.name]
    held_out = [_public_name(file) for file in config.data.eval_files]
    method = "imitation of demonstrations" if imitates else "reinforcement learning by rewards"
    shown = base if is_on_hub else PurePosixPath(base).name
    start = f"{shown} (weights dequantised from {quantized})" if quantized else shown
    lines = [
        f"---\n{to_yaml(head)}---\n\n# {shown}, trained with winnow\n",
        f"Step {step} of {config.trainer.steps}, by {method} (winnow {__version__}).\n",
        f"| Setting | |\n|---|---|\n| start | {start} |\n| training data | {', '.join(data)} |",
    ]
    lines += [f"| held-out data | {', '.join(held_out)} |"] if held_out else []
    functions = config.reward.functions().values()
    rewards = [f"{_public_name(str(each.path))}:{each.name}" for each in functions]
    lines += [f"| reward | {', '.join(rewards)} |"] if rewards else []
    installed = [f"{package} {version(package)}" for package in ("torch", "transformers")]
    lines.append(f"| versions | winnow {__version__}, {', '.join(installed)} |")
    for key in (*(_OF_SFT if imitates else _SETTINGS), *_OF_BOTH):
        lines.append(f"| {key} | {reduce(getattr, key.split('.'), config)} |")
    evaluated = [
        (r, {n: v for n, v in r.items() if n.startswith("eval/") or n == HELD_OUT_LOSS})
        for r in records
        if r["step"] <= step
    ]
    points = [(int(r["step"]), figures) for r, figures in evaluated if figures]
    if points:
        (first, before), (last, after) = points[0], points[-1]
        lines.append(f"\n| Held-out figure | step {first} | step {last} |\n|---|---|---|")
        lines += [f"| {n} | {before.get(n, float('nan')):.4g} | {after[n]:.4g} |" for n in after]
    lines += _accuracy_table([each for each in list_step_files(evaluations) if each[0] <= step])
    return "\n".join(lines) + "\n"


def _accuracy_table(files: Sequence[tuple[int, Path]]) -> Iterator[str]:
    """Yield a table of held-out accuracy with its interval, at the first evaluation and the last.

    Args:
        files: of the evaluations, with their steps.
    """
    if not files:
        return
    steps = " | ".join(f"step {step}" for step, _ in (files[0], files[-1]))
    yield f"\n| Held-out accuracy, 95 % interval over problems | {steps} |\n|---|---|---|"
    both = [parse_answers(file, read_rollouts(file)) for _, file in (files[0], files[-1])]
    for source in sorted({*both[-1].sources.values()}):
        cells = []
        for answers in both:
            marks = [answers.means[p] for p, of in answers.sources.items() if of == source]
            if not marks:  # it was not evaluated on then
                cells.append("")
                continue
            low, high = (average := mean_of(marks)).interval
            cells.append(f"{average.mean:.3f} [{low:.3f}, {high:.3f}]")
        yield f"| {source}, {len(marks):,} problems | {' | '.join(cells)} |"


def _public_name(file: str) -> str:
    """Return a data file's name without its folder; hub paths unchanged."""
    return file if is_on_hub(file) else PurePosixPath(file).name


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        return "the hub requires a valid token; set HF_TOKEN, or run `hf auth login`"
    if status == 403:
        return "the token has no write access; use one that has, or another OWNER/NAME"
    message = brief(error)
    if isinstance(error, ValueError) and status is None:
        return f"{message}; use OWNER/NAME"
    return f"the hub refuses: {message}" if status else f"the hub cannot be reached: {message}"
