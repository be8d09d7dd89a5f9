"""Prompts, segments, trajectories and scores as plain Python and numpy, and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from winnow.types import Answer, Prompt, Score, Segment, Trajectory, VersionSpan
from winnow.workers.array_refs import ArrayRef, PickleAsArray

Plain = dict[str, Any]


def plain_prompt(prompt: Prompt) -> Plain:
    """A prompt with its whole row, so that it need not be found again."""
    return {
        "uid": prompt.uid,
        "token_ids": prompt.token_ids,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra": dict(prompt.extra),
        "messages": [dict(message) for message in prompt.messages],
    }


def prompt_from(state: Mapping[str, Any]) -> Prompt:
    """The inverse of `plain_prompt`."""
    messages = tuple(state.get("messages", ()))  # older checkpoints have none
    return Prompt(**{**state, "messages": messages})


def plain_segment(segment: Segment | None) -> Plain | None:
    """Token ids, log-probs, version spans. What is stored elsewhere is fetched to be pickled."""
    if segment is None:
        return None
    return {
        "token_ids": _lasting(segment.token_ids),
        "logprobs": _lasting(segment.logprobs),
        "spans": [[span.version, span.stop] for span in segment.spans],
        "source": segment.source,
    }


def segment_from(state: Mapping[str, Any] | None) -> Segment | None:
    """The inverse of `plain_segment`."""
    if state is None:
        return None
    spans = tuple(VersionSpan(version, stop) for version, stop in state["spans"])
    ids, logprobs = np.asarray(state["token_ids"]), np.asarray(state["logprobs"])
    return Segment(ids, logprobs, spans, state["source"])


def _lasting(array: Any) -> Any:
    return PickleAsArray(array) if isinstance(array, ArrayRef) else array


def plain_trajectory(trajectory: Trajectory | None) -> Plain | None:
    """All segments, why it ended, and what travels with it."""
    if trajectory is None:
        return None
    return {
        "segments": [plain_segment(segment) for segment in trajectory.segments],
        "finish_reason": trajectory.finish_reason,
        "extras": dict(trajectory.extras),
    }


def trajectory_from(state: Mapping[str, Any] | None) -> Trajectory | None:
    """The inverse of `plain_trajectory`."""
    if state is None:
        return None
    segments = [segment_from(segment) for segment in state["segments"]]
    kept = tuple(segment for segment in segments if segment is not None)
    return Trajectory(kept, state["finish_reason"], dict(state["extras"]))


def plain_score(score: Score | None) -> Plain | None:
    """Every number and word of the scorer."""
    if score is None:
        return None
    return {
        "reward": score.reward,
        "accuracy": score.accuracy,
        "parts": dict(score.parts),
        "extra": dict(score.extra),
        "error": score.error,
        "outside": score.outside,
    }


def score_from(state: Mapping[str, Any] | None) -> Score | None:
    """The inverse of `plain_score`."""
    return None if state is None else Score(**state)


def plain_answer(answer: Answer | None) -> Plain | None:
    """A finished and scored answer."""
    if answer is None:
        return None
    return {
        "trajectory": plain_trajectory(answer.trajectory),
        "score": plain_score(answer.score),
    }


def answer_from(state: Mapping[str, Any] | None) -> Answer | None:
    """The inverse of `plain_answer`."""
    if state is None:
        return None
    trajectory, score = trajectory_from(state["trajectory"]), score_from(state["score"])
    assert trajectory is not None
    assert score is not None
    return Answer(trajectory, score)
