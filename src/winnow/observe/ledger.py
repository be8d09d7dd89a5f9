"""ledger.parquet: one row for each group whose life ended, the same however long anything took.

A folder of one part a step, `ledger.parquet/step-N.parquet`, which pyarrow and pandas read as one
table. A part is written when its step has been learnt and is replaced where a resumed run
does the step again, so that the folder always tells of one course of the run. A group that was
admitted and has no row is open: unfinished, waiting for a cut, or cut and not learnt yet.

| column | meaning |
|---|---|
| group | admission index |
| turn | place of its prompt among those the loader gave out; one given back keeps it |
| step | the step whose cut settled it |
| fate | trained, all_right, all_wrong, surplus, stale, failed |
| learnt_step | the step whose update it was part of; null unless trained |
| returned | its prompt went back to the loader, which gives it out again before any other |
| prompt_uid, problem | the row of data, and a digest of what it asks, as in rollouts/ |
| admitted_version | weight version of the engines when it was admitted |
| versions | weight versions that wrote its answers, each once |
| staleness | versions between the oldest of them and the weights that learn the step |
| answers | that were finished and scored, a greedy baseline included |
| tokens | generated for it, unfinished answers included |
| token_crc | CRC-32 of the token ids of its answers; null where they lie on another node |
| score_crc | CRC-32 of reward and accuracy of its answers, bit for bit |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from winnow.errors import WinnowError
from winnow.observe.files import PARTIAL, RunFolder, write_atomic
from winnow.observe.rollouts import list_step_files, problem_id
from winnow.types import IntArray, SettledGroup

_INT, _TEXT = pa.int32(), pa.string()
SCHEMA = pa.schema(
    [
        *(("group", pa.int64()), ("turn", pa.int64()), ("step", _INT), ("fate", _TEXT)),
        *(("learnt_step", _INT), ("returned", pa.bool_())),
        *(("prompt_uid", _TEXT), ("problem", _TEXT)),
        *(("admitted_version", _INT), ("versions", pa.list_(_INT)), ("staleness", _INT)),
        *(("answers", _INT),),
        *(("tokens", pa.int64()), ("token_crc", pa.uint32()), ("score_crc", pa.uint32())),
    ]
)


def write_ledger(
    folder: RunFolder, step: int, settled: Sequence[SettledGroup], returned: int
) -> None:
    """Write the part of a step.

    Args:
        settled: every group whose life ended in the step.
        returned: number of prompts that went back to the loader at the cut: those of the surplus,
            or of all groups admitted later than the last one trained.

    Raises:
        WinnowError: the file cannot be written; nothing half-written is left.
    """
    settled = sorted(settled, key=lambda each: each.group.id)
    surplus = sum(each.fate == "surplus" for each in settled)
    later = set() if returned == surplus else {s.group.id for s in settled[-returned:]}
    rows: list[dict[str, Any]] = []
    for each in settled:
        group, fate = each.group, each.fate
        went_back = fate in ("surplus", "stale") or group.id in later
        scores = ((a.score.reward, a.score.accuracy) for a in group.scored)
        segments = [answer.trajectory.segments for answer in group.scored]
        versions = {span.version for part in chain(*segments) for span in part.spans}
        has_ids = all(type(part.token_ids) is np.ndarray for part in chain(*segments))
        ids = ((part.token_ids for part in parts) for parts in segments)
        row = (
            *(group.id, each.turn, step, fate, step if fate == "trained" else None, went_back),
            *(group.prompt.uid, problem_id(group.prompt), each.admitted_version),
            *(sorted(versions), each.staleness, len(group.scored), each.tokens),
            *(token_crc(ids) if has_ids else None, score_crc(scores)),
        )
        rows.append(dict(zip(SCHEMA.names, row, strict=True)))
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    part = folder.ledger / f"step-{step}.parquet"
    # Beside the folder, of which a reader takes every file.
    draft = folder.path / f"{folder.ledger.name}-{step}{PARTIAL}"
    write_atomic(part, sink.getvalue().to_pybytes(), draft)


def read_ledger(folder: RunFolder) -> pa.Table:
    """Read the ledger of a run, in the order of admission; the steps are 1, 2, 3, … to the last.

    Parts of an older winnow have no turns: they are null.

    Raises:
        WinnowError: there is none, a step is missing, or a part is damaged.
    """
    parts = list_step_files(folder.ledger)
    if not parts:
        raise WinnowError(
            f"{folder.path} has no {folder.ledger.name}: no step has finished yet, or an older "
            "winnow wrote the run; choose another run"
        )
    for number, (step, _) in enumerate(parts, start=1):
        if step != number:
            raise WinnowError(
                f"{folder.ledger} has no file for step {number} of {parts[-1][0]}: it was removed, "
                "or an older winnow ran that step; restore it, or choose another run"
            )
    tables = [_read_part(path) for _, path in parts]
    return pa.concat_tables(tables).sort_by([("group", "ascending"), ("step", "ascending")])


def _read_part(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read()
        if "turn" not in table.column_names:
            table = table.append_column("turn", pa.nulls(len(table), pa.int64()))
        # Schema and all, or a column of lists that holds nothing could read otherwise.
        return table.select(SCHEMA.names).cast(SCHEMA)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise WinnowError(
            f"cannot read {path}: {reason}; restore it from a copy of the run, or resume from "
            "a checkpoint before that step"
        ) from error


def token_crc(answers: Iterable[Iterable[IntArray]]) -> int:
    """Digest the token ids of answers, one by one, however they are cut into segments."""
    crc, lengths = 0, []
    for segments in answers:
        length = 0
        for ids in segments:
            crc = crc32(ids.data, crc)
            length += len(ids)
        lengths.append(length)
    return crc32(struct.pack(f"{len(lengths)}q", *lengths), crc)


def score_crc(scores: Iterable[tuple[float, float]]) -> int:
    """Digest reward and accuracy of a group's answers, bit for bit."""
    marks = [mark for score in scores for mark in score]
    return crc32(struct.pack(f"{len(marks)}d", *marks))
