"""rollouts/step-N.parquet: one row for each answer whose group closed in step N.

eval/step-N.parquet, the answers to held-out prompts after step N, has the same form.

docs/answers.md says what each column means, and of which answers the text is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from winnow.config.root import ObserveConfig
from winnow.errors import WinnowError
from winnow.observe.files import PARTIAL, explain_write_errors, write_atomic
from winnow.types import Answer, Fate, FloatArray, Group, Image, IntArray, Prompt, Trajectory

Decode = Callable[[IntArray], str]
STEP_FILE = re.compile(r"step-(\d+)\.parquet")
"""Names of the files, with the step."""
# A dictionary pays where values repeat; elsewhere it only costs time.
_REPEATED = ["kind", "prompt_uid", "data_source", "outcome", "finish_reason", "scorer_error"]
_LEAST_TEXT_GROUPS = 8
"""Groups of a step that keep their text, however long it is."""
IMAGES = "images"
"""Folder of a run with the images of its answers, by digest."""
ROW_GROUP = 512
"""Rows that are read at least to see the tokens of one."""
_INT, _FLOAT, _TEXT, _IDS = pa.int32(), pa.float64(), pa.string(), pa.list_(pa.int32())
_COUNTS = ("calls", "malformed")
_PATHS = pa.list_(_TEXT)
_TURN = {"author": _TEXT, "text": _TEXT, "tokens": _INT, "reward": _FLOAT}
_TURN |= {**dict.fromkeys(_COUNTS, _INT), "images": _PATHS}
COLUMNS = {
    **{"step": _INT, "group": pa.int64(), "answer": _INT, "kind": _TEXT, "prompt_uid": _TEXT},
    **{"data_source": _TEXT, "problem": _TEXT, "outcome": _TEXT, "prompt_tokens": _INT},
    **{"response_tokens": _INT, "reward": _FLOAT, "accuracy": _FLOAT, "advantage": _FLOAT},
    **{"oldest_version": _INT, "newest_version": _INT, "staleness": _INT, "finish_reason": _TEXT},
    **{"scorer_error": _TEXT, "pred": _TEXT, "prompt": _TEXT, "response": _TEXT},
    **{"prompt_ids": _IDS, "token_ids": _IDS, "logprobs": pa.list_(pa.float32()), "versions": _IDS},
    **{"mismatch": _FLOAT, "trainer_logprobs": pa.list_(pa.float32())},
    **{"entropies": pa.list_(pa.float32())},
    **{"images": _PATHS},
    **{"turns": pa.list_(pa.struct(_TURN))},
}
"""Types of the columns that every file has."""


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """A closed group with its outcome; its baseline, if there is one, is written, too."""

    group: Group
    outcome: Fate | Literal["held_out", "held_out_greedy"]
    advantages: FloatArray | None = None
    """One a sampled answer; None unless trained."""
    mismatch: FloatArray | None = None
    """One a sampled answer: mean distance of the sampler's log-probs from the trainer's, nats."""
    trainer_logprobs: Sequence[FloatArray] | None = None
    """[L] nats for each sampled answer; None where the step took no pass for them."""
    entropies: Sequence[FloatArray] | None = None
    """[L] nats for each sampled answer, of the same pass."""


def problem_id(prompt: Prompt) -> str:
    """Digest what a prompt asks and what its answers are compared with.

    The conversation counts, not the text that a tokenizer's template makes of it, so that two
    models answer the same problem.
    """
    messages = [(message.get("role"), message.get("content")) for message in prompt.messages]
    content = repr((prompt.data_source, prompt.ground_truth, messages or prompt.text))
    content += "".join(image.digest for image in prompt.images)
    return blake2b(content.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def choose_text_groups(
    groups: Iterable[RolloutGroup], config: ObserveConfig, seed: int, step: int
) -> set[int]:
    """Choose the groups whose text is kept: all if they are few, else a seeded choice.

    Those of which a scoring failed are kept besides.
    """
    tokens: dict[int, int] = {}
    failed: set[int] = set()
    for entry in groups:
        answers = entry.group.scored
        written = sum(len(segment) for each in answers for segment in each.trajectory.segments)
        tokens[entry.group.id] = tokens.get(entry.group.id, 0) + written
        if any(answer.score.error for answer in answers):
            failed.add(entry.group.id)
    # The order of a seed, so that what a smaller bound keeps a larger one does, too.
    order = np.random.default_rng([seed, step]).permutation(sorted(tokens)).tolist()
    count = config.rollout_text_groups
    if count is None:
        sums = accumulate(tokens[each] for each in order)
        fitting = sum(total <= config.rollout_text_tokens for total in sums)
        count = max(fitting, _LEAST_TEXT_GROUPS)
    return failed | set(order[:count])


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    text_groups: Collection[int],
    decode: Decode,
    image_mib: float = math.inf,
) -> None:
    """Write the answers of a step. `version` is the policy's before the step's first update.

    Only the answers of `text_groups` are decoded and kept with text, ids, log-probs and images,
    which lie by their digests in the folder `images` of the run.

    Args:
        image_mib: most MiB of that folder; images beyond are left out.

    Raises:
        WinnowError: the file cannot be written; nothing half-written is left.
    """
    stored = _store_images(path.parent.parent / IMAGES, groups, text_groups, image_mib)
    rows = [
        row
        for entry in groups
        for row in _answer_rows(
            step, entry, version, decode if entry.group.id in text_groups else None, stored
        )
    ]
    names = dict.fromkeys([*COLUMNS, *chain.from_iterable(rows)])
    table = pa.table({name: _make_column(name, [row.get(name) for row in rows]) for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, row_group_size=ROW_GROUP, compression="zstd", use_dictionary=_REPEATED
    )
    write_atomic(path, sink.getvalue().to_pybytes())


def _store_images(
    folder: Path, groups: Sequence[RolloutGroup], text_groups: Collection[int], most_mib: float
) -> set[str]:
    """Write the images of some groups, each once; return the names of all that are there."""
    chosen = [entry.group for entry in groups if entry.group.id in text_groups]
    images = [i for g in chosen for a in g.scored for i in (*g.prompt.images, *a.trajectory.images)]
    stored = {file.name: file.stat().st_size for file in folder.glob("*.png")}
    for image in images:
        name, size = f"{image.digest}.png", len(image.png)
        if name not in stored and sum(stored.values()) + size <= most_mib * 2**20:
            write_atomic(folder / name, image.png)
            stored[name] = size
    return {*stored}


def read_rollouts(path: Path) -> pa.Table:
    """Read the rows of one step's file, or of all files of a folder in the order of their steps.

    A column that only some files have is null in the others; where a scorer's figure is a number
    in one and text in another, it is text in all.

    Raises:
        WinnowError: nothing there, or a damaged file.
    """
    files = [path] if path.is_file() else [file for _, file in list_step_files(path)]
    if not files:
        raise WinnowError(f"no rollouts at {path}; give a run's rollouts folder or a file in it")
    tables = []
    for file in files:
        try:
            tables.append(pq.ParquetFile(file).read())
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise WinnowError(f"cannot read {file}: {reason}; delete it to continue") from error
    text = {field.name for table in tables for field in table.schema if field.type == _TEXT}
    alike = [
        table.cast(pa.schema([f.with_type(_TEXT) if f.name in text else f for f in table.schema]))
        for table in tables
    ]
    return pa.concat_tables(alike, promote_options="permissive")


def turn_heading(number: int, turn: Mapping[str, Any]) -> str:
    """Describe a turn of the column `turns`: author, length, calls, reward."""
    figures = [f"{name} {turn[name]:g}" for name in (*_COUNTS, "reward") if turn[name]]
    return ", ".join([f"{number} {turn['author']}", f"{turn['tokens']:,} tokens", *figures])


def list_step_files(folder: Path) -> list[tuple[int, Path]]:
    """List the steps that have a file in a rollouts folder, and the files."""
    if not folder.is_dir():
        return []
    matches = ((STEP_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in matches if match)


def delete_rollouts_after(folder: Path, step: int) -> None:
    """Delete the files of later steps and what a crash left half-written: a resumed run's start.

    Raises:
        WinnowError: the folder cannot be changed.
    """
    late = [file for number, file in list_step_files(folder) if number > step]
    for file in [*late, *folder.glob(f"*{PARTIAL}")]:
        with explain_write_errors(file):
            file.unlink()


def _answer_rows(
    step: int, entry: RolloutGroup, version: int, decode: Decode | None, stored: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the row of each answer of a group, without texts if there is no `decode`.

    What does not apply is absent.
    """
    group, prompt = entry.group, entry.group.prompt
    common: dict[str, Any] = {
        "step": step,
        "group": group.id,
        "prompt_uid": prompt.uid,
        "data_source": prompt.data_source,
        "problem": problem_id(prompt),
        "outcome": entry.outcome,
        "prompt_tokens": len(prompt.token_ids),
    }
    if decode:
        common |= {"prompt": prompt.text, "prompt_ids": prompt.token_ids.astype(np.int32)}
    advantages = [] if entry.advantages is None else entry.advantages.tolist()
    for index, answer in enumerate(group.scored):
        is_greedy = entry.outcome == "held_out_greedy" or answer is group.baseline
        row = {**common, "answer": index, "kind": "greedy" if is_greedy else "sampled"}
        if index < len(advantages):
            row["advantage"] = advantages[index]
            row["mismatch"] = None if entry.mismatch is None else entry.mismatch[index]
            for name in ("trainer_logprobs", "entropies") if decode else ():
                if (values := getattr(entry, name)) is not None:
                    row[name] = values[index].astype(np.float32)
        texts = _text_columns(answer, decode) if decode else {}
        turns = _turns(answer.trajectory, decode, stored)
        shown = (*prompt.images, *answer.trajectory.images) if decode else ()
        row |= {"turns": turns, "images": _paths(shown, stored)}
        yield {**row, **_score_columns(answer, version), **texts}


def _score_columns(answer: Answer, version: int) -> dict[str, Any]:
    score, trajectory = answer.score, answer.trajectory
    row = {
        "response_tokens": sum(len(segment) for segment in trajectory.segments),
        "reward": score.reward,
        **{f"part/{name}": value for name, value in score.parts.items()},
        "accuracy": score.accuracy,
        "finish_reason": trajectory.finish_reason,
        "scorer_error": score.error,
        "pred": score.extra.get("pred"),
        **{f"extra/{name}": value for name, value in score.extra.items() if name != "pred"},
    }
    if versions := trajectory.versions:
        row |= {"oldest_version": versions[0], "newest_version": versions[-1]}
        row["staleness"] = version - versions[0]
    return row


def _text_columns(answer: Answer, decode: Decode) -> dict[str, Any]:
    ids = answer.trajectory.token_ids
    return {
        "response": decode(ids),
        "token_ids": ids.astype(np.int32),
        "logprobs": answer.trajectory.logprobs.astype(np.float32),
        "versions": _token_versions(answer),
    }


def _paths(images: Iterable[Image], stored: Collection[str]) -> list[str] | None:
    """Return the paths of images in the run's folder, without those that are not stored."""
    names = (f"{image.digest}.png" for image in images)
    return [f"{IMAGES}/{name}" for name in names if name in stored] or None


def _turns(
    trajectory: Trajectory, decode: Decode | None, stored: Collection[str]
) -> list[dict[str, Any]] | None:
    """Return the turns of a conversation, without texts if there is no `decode`; else None."""
    segments = trajectory.segments
    if not (segments[1:] or any(each.figures for each in segments)):
        return None
    return [
        {
            "author": segment.source,
            "text": None if decode is None else decode(segment.token_ids),
            "tokens": len(segment),
            "reward": segment.reward if segment.source == "model" else None,
            "images": None if decode is None else _paths(segment.images, stored),
            **{each: int(segment.figures[each]) for each in _COUNTS if each in segment.figures},
        }
        for segment in segments
    ]


def _token_versions(answer: Answer) -> IntArray:
    """Return the weight version that wrote each token [L]; -1 where none did."""
    versions: list[IntArray] = []
    for segment in answer.trajectory.segments:
        stops = [span.stop for span in segment.spans]
        lengths = np.diff([0, *stops], append=len(segment)) if stops else [len(segment)]
        versions.append(np.repeat([*(span.version for span in segment.spans), -1], lengths))
    return np.concatenate(versions).astype(np.int32)


def _make_column(name: str, values: list[Any]) -> Any:
    """Make a column; what a scorer said is numbers if all are, else text."""
    kind = COLUMNS.get(name)
    if kind is None:
        numeric = (int, float, np.number, np.bool_, type(None))
        kind = _FLOAT if all(isinstance(value, numeric) for value in values) else _TEXT
    try:
        if kind == _FLOAT:
            values = [None if value is None else float(value) for value in values]
    except OverflowError:  # an integer beyond any float stays readable as text
        kind = _TEXT
    if kind == _TEXT:  # a scorer may return half a surrogate pair
        values = [None if v is None else str(v).encode("utf-8", "replace") for v in values]
    return pa.array(values, kind)
