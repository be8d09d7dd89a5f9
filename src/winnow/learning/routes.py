"""Routes of a step's tokens, from the engine to a mixture's routers, and figures of its experts.

Shapes: `T` packed tokens, `L` layers that are mixtures, `E` experts of a layer, `k` experts a token
goes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.errors import TrainingError
from winnow.learning.batch import Batch
from winnow.models.routing import FIELD, ExpertLoad, RouteShape
from winnow.observe.metrics import Metrics
from winnow.types import PROMPT_ROUTES, ROUTES, Group


def token_routes(groups: Sequence[Group], batch: Batch, shape: RouteShape) -> Tensor:
    """Return the experts that each token went to in the engine.

    Args:
        groups: those of which `batch` was packed.
        shape: of the model's routes.

    Returns:
        [T, L, k] in the type of `shape`; -1 at the last token of each sample, which the engine drew
        and never ran.

    Raises:
        TrainingError: an answer came without routes, or with those of another model.
    """
    size = len(batch.token_ids), shape.layers, shape.choices
    routes_T = torch.full(size, -1, dtype=shape.dtype)
    routes = routes_T.numpy()
    keys = [(g.id, i, a) for g in groups for i, a in enumerate(g.answers)]
    starts = batch.offsets.tolist()
    for place in batch.samples.tolist():
        group, index, answer = keys[place]
        extras = answer.trajectory.extras
        parts = [np.asarray(extras[n]) for n in (PROMPT_ROUTES, ROUTES) if n in extras]
        rows = routes[starts[place] : starts[place + 1] - 1]
        came = [part.shape for part in parts]
        fits = sum(n for n, *_ in came) == len(rows) and all(each[1:] == size[1:] for each in came)
        if not fits or not all(_are_experts(part, shape.experts) for part in parts):
            raise TrainingError(
                f"answer {index} of group {group} has routes {came} for {len(rows)} tokens of "
                f"{shape.layers} layers with {shape.choices} of {shape.experts} experts each, and "
                f"{FIELD}=true replays them; have the engine put prompt_routes and routes into "
                f"the extras of its events, or set {FIELD}=false"
            )
        np.concatenate(parts, out=rows, casting="same_kind")
    return routes_T


def _are_experts(routes: NDArray[Any], experts: int) -> bool:
    """Return whether all are numbers of experts, or -1."""
    if routes.dtype.kind not in "iu" or not routes.size:
        return not routes.size
    return bool(routes.min() >= -1 and routes.max() < experts)


def load_figures(load: ExpertLoad | None) -> Metrics:
    """Report how evenly the tokens of a step went to the experts, and what a replay has changed.

    Returns:
        `experts/max_load`, `experts/unused` and, after a replay, `experts/rerouted`; nothing of a
        dense model, nor where nothing has run.
    """
    metrics = Metrics()
    if load is None or not load.tokens.any():
        return metrics
    mean_L = load.tokens.double().mean(1)
    metrics.max("experts/max_load", float((load.tokens.amax(1) / mean_L).max()))
    metrics.mean_of("experts/unused", int((load.tokens == 0).sum()), load.tokens.numel())
    if load.replayed:
        metrics.mean_of("experts/rerouted", load.rerouted, load.replayed)
    return metrics
