"""Running a model on a micro-batch of packed samples, and reading numbers off its hidden states.

Shapes: `T` packed tokens of a micro-batch, `S` of them scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from winnow.algorithms.logprobs import OutputHead, chunk_size, token_logprobs
from winnow.learning.batch import MicroBatch
from winnow.models.causal_lm import hidden_states, is_reward_model, is_value_model, output_head
from winnow.models.packed_attention import PackedLayout, can_share_prefixes, copy_tokens
from winnow.models.value import scalar_head
from winnow.models.vision import encode_images
from winnow.types import Image

Output = Literal["logprob", "entropy", "prob_square_sum", "value", "score"]
Outputs = Mapping[Output, Tensor]


class ModelRunner(nn.Module):
    """Run a model on a micro-batch and read the outputs off its hidden states.

    Both happen in the forward pass of one module: a sharded model's head is gathered by then, and
    the log-prob kernel can read its weight.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        vocab_size: int | None,
        chunk_tokens: int | None,
        fp32_head: bool,
        kernels: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._kernels = kernels
        self._temperature, self._vocab_size = temperature, vocab_size
        self._chunk_tokens, self._fp32_head = chunk_tokens, fp32_head
        self._gives_value, self._gives_score = is_value_model(model), is_reward_model(model)

    def forward(
        self, micro: MicroBatch | tuple[Image, ...], outputs: frozenset[Output] = frozenset()
    ) -> dict[Output, Tensor] | Tensor:
        """Return the requested outputs, each [T] and 0 where the model gives none.

        Given images, it returns their features instead, [1 + D, M, H].
        """
        if isinstance(micro, tuple):
            return encode_images(self.model, micro)
        # A log-prob of token t, or the value before it, comes from the state at t - 1.
        at, shift = micro.scored_positions, 1
        if self._gives_score:
            at, shift = micro.offsets[1:] - 1, 0
        states, at = self._states(micro, at, shift)
        if self._gives_score or self._gives_value:
            head = scalar_head(self.model)
            # Called, not read: where the head is a separate unit, the call gathers its weight.
            numbers = head(states.to(head.weight.dtype))[:, 0]
            computed: dict[Output, Tensor] = {"score" if self._gives_score else "value": numbers}
        else:
            computed = self._logprobs(states, micro.token_ids[at], outputs)
        return {name: self._scatter(values, at, micro) for name, values in computed.items()}

    def _states(self, micro: MicroBatch, at: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        """Return the states that lie `shift` before the positions `at`, and these positions."""
        ids, positions, rows, shared = micro.token_ids, micro.positions, at - shift, micro.shared
        lengths, prefixes = micro.contexts, tuple[int, ...]()
        if shared is not None:
            ids, positions = (x.index_select(0, shared.tokens) for x in (ids, positions))
            lengths, prefixes = shared.lengths, shared.prefixes
            rows = shared.rows.index_select(0, rows)
        layout = PackedLayout(lengths, ids.device, self._kernels, prefixes)
        hidden = hidden_states(self.model, ids, micro.images or positions, layout)
        return hidden.index_select(0, rows) if shared is None else copy_tokens(hidden, rows), at

    def can_share_prompts(self, device: torch.device) -> bool:
        """Return whether one prompt's states can serve several answers (`MicroBatch.shared`)."""
        config = cast(Any, self.model).config.get_text_config()
        heads, dtype = config.num_attention_heads, next(self.model.parameters()).dtype
        channels = getattr(config, "head_dim", None) or config.hidden_size // heads
        return can_share_prefixes(self._kernels or device.type, dtype, channels)

    def local_tokens(self, values: Tensor, fill: int = 0) -> tuple[Tensor, int]:
        """Return values [T, …] of the local tokens, with padding, and the number of real ones."""
        return values, len(values)

    def _head(self) -> OutputHead:
        """Return the model's head, or this rank's rows of it."""
        head = output_head(self.model)
        return OutputHead(head.weight, head.bias)

    def _scatter(self, values: Tensor, at: Tensor, micro: MicroBatch) -> Tensor:
        """Spread the values of some positions over [T], with 0 elsewhere."""
        blank = torch.zeros(len(micro.token_ids), dtype=values.dtype, device=values.device)
        return blank.index_copy(0, at, values)

    def _logprobs(
        self, states: Tensor, token_ids: Tensor, outputs: frozenset[Output]
    ) -> dict[Output, Tensor]:
        head, chunk = self._head()._replace(vocab_size=self._vocab_size), self._chunk_tokens
        if self._kernels is not None:
            chunk = chunk_size(self._vocab_size or len(head.weight), chunk, self._kernels)
        if self._fp32_head:
            head = head._replace(dtype=torch.promote_types(states.dtype, torch.float32))
        logprob, entropy, squares = token_logprobs(
            states,
            head,
            token_ids,
            self._temperature,
            with_entropy="entropy" in outputs,
            with_prob_square_sum="prob_square_sum" in outputs,
            chunk_tokens=chunk,
        )
        computed: dict[Output, Tensor | None] = {"entropy": entropy, "prob_square_sum": squares}
        if "logprob" in outputs:
            computed["logprob"] = logprob
        return {name: values for name, values in computed.items() if values is not None}
