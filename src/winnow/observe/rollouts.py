"""rollouts/step-N.parquet: one row for each answer whose group closed in step N.

eval/step-N.parquet, the answers to held-out prompts after step N, has the same form.

| columns | meaning |
|---|---|
| step, group, answer | group is the admission index, answer the place among its finished ones |
| kind | sampled, greedy; a greedy one beside sampled ones is their baseline, and stands last |
| prompt_uid, data_source | the row of data |
| problem | what it asks and is compared with, as a digest: the same for copies of a row |
| outcome | trained, all_right, all_wrong, surplus, stale, failed; held_out, held_out_greedy |
| prompt_tokens, response_tokens | lengths |
| reward, part/NAME, accuracy | the score; reward is the sum of the parts, each by its weight |
| advantage | null unless trained, and for a baseline |
| oldest_version, newest_version, staleness | weight versions that wrote it, and how far behind |
| finish_reason, scorer_error | |
| pred, extra/NAME | what else the scorer said; numbers as numbers, the rest as text |
| prompt, response | text; with the next two only for a seeded choice of groups, else null |
| prompt_ids, token_ids, logprobs | ids as the policy saw them, log-probs of the sampler in nats |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from winnow.errors import WinnowError
from winnow.observe.files import PARTIAL, disk_error, write_atomic
from winnow.observe.names import Outcome
from winnow.types import Answer, FloatArray, Group, IntArray, Prompt

Decode = Callable[[IntArray], str]
_FILE = re.compile(r"step-(\d+)\.parquet")
# A dictionary pays where values repeat; elsewhere it only costs time.
_REPEATED = ["kind", "prompt_uid", "data_source", "outcome", "finish_reason", "scorer_error"]


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """A closed group and what became of it; its baseline, if there is one, has a row too."""

    group: Group
    outcome: Outcome | Literal["held_out", "held_out_greedy"]
    advantages: FloatArray | None = None
    """One a sampled answer; None unless trained."""

    @property
    def kinds(self) -> list[str]:
        """The kind of each scored answer, `sampled` or `greedy`."""
        kind = "greedy" if self.outcome == "held_out_greedy" else "sampled"
        baseline = [] if self.group.baseline is None else ["greedy"]
        return [kind] * len(self.group.answers) + baseline


def problem_id(prompt: Prompt) -> str:
    """Digest what a prompt asks and what its answers are compared with.

    The conversation counts, not the text that a tokenizer's template makes of it, so that two
    models answer the same problem.
    """
    asked = [(message.get("role"), message.get("content")) for message in prompt.messages]
    said = repr((prompt.data_source, prompt.ground_truth, asked or prompt.text))
    return blake2b(said.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def choose_text_groups(group_ids: Iterable[int], count: int, seed: int, step: int) -> set[int]:
    """Choose the groups of a step whose text is kept: all if they are few, else a seeded choice."""
    ordered = sorted(group_ids)
    if len(ordered) <= count:
        return set(ordered)
    generator = np.random.default_rng([seed, step])
    return {ordered[i] for i in generator.choice(len(ordered), count, replace=False)}


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    text_groups: Collection[int],
    decode: Decode,
) -> None:
    """Write the answers of a step. `version` is the policy's before the step's first update.

    Only the answers of `text_groups` are decoded and kept with text, ids and log-probs.

    Raises:
        WinnowError: the file cannot be written; nothing half-written is left.
    """
    table = _table(step, groups, version, frozenset(text_groups), decode)
    sink = pa.BufferOutputStream()
    repeated = [name for name in _REPEATED if name in table.column_names]
    pq.write_table(table, sink, compression="zstd", use_dictionary=repeated)
    write_atomic(path, sink.getvalue().to_pybytes())


def read_rollouts(path: Path) -> pa.Table:
    """Read the rows of one step's file, or of all files of a folder in the order of their steps.

    A column that only some files have is null in the others; where a scorer's figure is a number
    in one and text in another, it is text in all.

    Raises:
        WinnowError: nothing there, or a damaged file.
    """
    files = [path] if path.is_file() else [file for _, file in rollout_files(path)]
    if not files:
        raise WinnowError(f"no rollouts at {path}; name a run's rollouts folder or a file in it")
    tables = []
    for file in files:
        try:
            tables.append(pq.ParquetFile(file).read())
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise WinnowError(f"cannot read {file}: {reason}; delete it to go on") from error
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError:
        return pa.concat_tables(_as_text_where_unlike(tables), promote_options="permissive")


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    """List the steps that have a file in a rollouts folder, and the files."""
    if not folder.is_dir():
        return []
    matches = ((_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in matches if match)


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Delete the files of later steps and what a crash left half-written: a resumed run's start.

    Raises:
        WinnowError: the folder cannot be changed.
    """
    late = [file for number, file in rollout_files(folder) if number > step]
    for file in [*late, *folder.glob(f"*{PARTIAL}")]:
        try:
            file.unlink()
        except OSError as error:
            raise disk_error(file, error) from error


def _table(
    step: int,
    groups: Sequence[RolloutGroup],
    version: int,
    text_groups: frozenset[int],
    decode: Decode,
) -> pa.Table:
    rows = [(entry, answer) for entry in groups for answer in entry.group.scored]
    answers = [answer for _, answer in rows]
    prompts = [entry.group.prompt for entry, _ in rows]
    indices = [index for entry in groups for index in range(len(entry.group.scored))]
    problems = {entry.group.prompt.uid: problem_id(entry.group.prompt) for entry in groups}
    versions = [answer.trajectory.versions for answer in answers]
    oldest = [v[0] if v else None for v in versions]
    columns = {
        "step": pa.array(np.full(len(rows), step, dtype=np.int32)),
        "group": _ints([entry.group.id for entry, _ in rows], pa.int64()),
        "answer": _ints(indices),
        "kind": _strings([kind for entry in groups for kind in entry.kinds]),
        "prompt_uid": _strings([prompt.uid for prompt in prompts]),
        "data_source": _strings([prompt.data_source for prompt in prompts]),
        "problem": _strings([problems[prompt.uid] for prompt in prompts]),
        "outcome": _strings([entry.outcome for entry, _ in rows]),
        "prompt_tokens": _ints([len(prompt.token_ids) for prompt in prompts]),
        "response_tokens": _ints([_length(answer) for answer in answers]),
        "reward": _floats([answer.score.reward for answer in answers]),
        **_parts(answers),
        "accuracy": _floats([answer.score.accuracy for answer in answers]),
        "advantage": _advantages(groups),
        "oldest_version": _ints(oldest),
        "newest_version": _ints([v[-1] if v else None for v in versions]),
        "staleness": _ints([None if v is None else version - v for v in oldest]),
        "finish_reason": _strings([answer.trajectory.finish_reason for answer in answers]),
        "scorer_error": _strings([answer.score.error for answer in answers]),
        **_extras(answers),
        **_texts(rows, prompts, text_groups, decode),
    }
    return pa.table(columns)


def _as_text_where_unlike(tables: Sequence[pa.Table]) -> list[pa.Table]:
    kinds: dict[str, set[Any]] = {}
    for field in (field for table in tables for field in table.schema):
        kinds.setdefault(field.name, set()).add(field.type)
    unlike = {n for n, found in kinds.items() if pa.string() in found and len(found) > 1}
    return [
        table.cast(
            pa.schema(
                [pa.field(f.name, pa.string()) if f.name in unlike else f for f in table.schema]
            )
        )
        for table in tables
    ]


def _length(answer: Answer) -> int:
    return sum(len(segment) for segment in answer.trajectory.segments)


def _ints(values: list[Any], kind: Any = None) -> Any:
    return pa.array(values, type=kind or pa.int32())


def _floats(values: list[Any]) -> Any:
    return pa.array(values, type=pa.float64())


def _strings(values: Sequence[str | None]) -> Any:
    try:
        return pa.array(values, type=pa.string())
    except UnicodeEncodeError:  # a scorer may return half a surrogate pair
        safe = [v if v is None else v.encode("utf-8", "replace").decode() for v in values]
        return pa.array(safe, type=pa.string())


def _parts(answers: Sequence[Answer]) -> dict[str, Any]:
    names = _names(answer.score.parts for answer in answers)
    return {f"part/{n}": _floats([a.score.parts.get(n) for a in answers]) for n in names}


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    """List every key in the order of first mention."""
    return list(dict.fromkeys(chain.from_iterable(mappings)))


def _extras(answers: Sequence[Answer]) -> dict[str, Any]:
    columns = {}
    for name in _names(answer.score.extra for answer in answers):
        values = [answer.score.extra.get(name) for answer in answers]
        if name == "pred":
            columns["pred"] = _strings([None if v is None else str(v) for v in values])
        else:
            columns[f"extra/{name}"] = _numbers_or_text(values)
    columns.setdefault("pred", pa.nulls(len(answers), pa.string()))
    return columns


def _numbers_or_text(values: list[Any]) -> Any:
    numeric = (int, float, np.number, np.bool_, type(None))
    if all(isinstance(value, numeric) for value in values):
        try:
            return _floats([None if value is None else float(value) for value in values])
        except OverflowError:
            pass  # an integer beyond any float stays readable as text
    return _strings([None if value is None else str(value) for value in values])


def _advantages(groups: Sequence[RolloutGroup]) -> Any:
    chunks = []
    for entry in groups:
        known = 0 if entry.advantages is None else len(entry.advantages)
        if entry.advantages is not None:
            chunks.append(pa.array(np.asarray(entry.advantages, dtype=np.float64)))
        chunks.append(pa.nulls(len(entry.group.scored) - known, pa.float64()))
    return pa.chunked_array(chunks, type=pa.float64())


def _texts(
    rows: Sequence[tuple[RolloutGroup, Answer]],
    prompts: Sequence[Prompt],
    text_groups: frozenset[int],
    decode: Decode,
) -> dict[str, Any]:
    shown = [entry.group.id in text_groups for entry, _ in rows]
    paths = [a.trajectory if s else None for (_, a), s in zip(rows, shown, strict=True)]
    asked = [p if s else None for p, s in zip(prompts, shown, strict=True)]
    return {
        "prompt": _strings([None if p is None else p.text for p in asked]),
        "response": _strings([None if t is None else decode(t.token_ids) for t in paths]),
        "prompt_ids": _lists([None if p is None else p.token_ids for p in asked], np.int32),
        "token_ids": _lists([None if t is None else t.token_ids for t in paths], np.int32),
        "logprobs": _lists([None if t is None else t.logprobs for t in paths], np.float32),
    }


def _lists(arrays: Sequence[Any], dtype: type[np.generic]) -> Any:
    """Build a list column from one flat array: pyarrow walks nested ones cell by cell."""
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))
    kept = [array for array in arrays if array is not None]
    if not kept:
        return pa.nulls(len(arrays), kind)
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    empty = np.array([array is None for array in arrays])
    flat = pa.array(np.concatenate(kept).astype(dtype, copy=False))
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=pa.array(empty))
