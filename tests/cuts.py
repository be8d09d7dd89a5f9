"""Models cut into rectangles over ranks as Megatron cuts them, from tensors that are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.learning.shards import Piece, State

COLUMNS = ".o_proj.", ".down_proj.weight"
ROWS = ".q_proj.", ".k_proj.", ".v_proj.", ".gate_proj.", ".up_proj.", "embed_tokens", "lm_head"
EXPERTS = ".experts."


@dataclass(frozen=True)
class Cut:
    """One rank's place: tensor-parallel rank of all, pipeline stage of all."""

    tensor: int = 0
    tensors: int = 1
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, rank: int, tensors: int, stages: int) -> Cut:
        return cls(rank % tensors, tensors, rank // tensors, stages)

    def has(self, name: str) -> bool:
        """Layers in turn; embeddings on the first stage and, as a head, on the last."""
        if ".layers." in name:
            return int(name.split(".layers.")[1].split(".")[0]) % self.stages == self.stage
        first = "embed_tokens" in name and self.stage == 0
        return first or self.stage == self.stages - 1

    def piece(self, name: str, whole: Tensor) -> Piece:
        """This rank's part, a view of the whole tensor; all of it where ranks have the same."""
        own, offsets = whole, [0] * whole.ndim
        if any(part in name for part in (*COLUMNS, *ROWS, EXPERTS)) and "_norm" not in name:
            is_columns = EXPERTS not in name and any(part in name for part in COLUMNS)
            axis = 1 if is_columns else 0
            # As tensor_split cuts: the first ranks have one row more.
            parts = torch.arange(whole.shape[axis]).tensor_split(self.tensors)
            sizes = [len(part) for part in parts]
            offsets[axis] = sum(sizes[: self.tensor])
            own = whole.narrow(axis, offsets[axis], sizes[self.tensor])
        if EXPERTS in name:  # a model may hold them the other way round
            own = own.mT.contiguous().mT
        return Piece(own, whole.shape, offsets)

    def weights(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of weights, as a strategy exports them: it names all."""
        return {
            name: self.piece(name, t) if self.has(name) else Piece.absent(t.shape, t.dtype)
            for name, t in wholes.items()
        }

    def state(self, whole: Mapping[str, Any]) -> State:
        """This rank's part of what `Strategy.state_dict` gives: the names that it has."""
        return {
            "weights": {n: self.piece(n, t) for n, t in whole["weights"].items() if self.has(n)},
            "optimizer": {
                name: {
                    key: self.piece(name, t) if key != "step" else t for key, t in moments.items()
                }
                for name, moments in whole["optimizer"].items()
                if self.has(name)
            },
        }
