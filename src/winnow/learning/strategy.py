"""Strategies: how one model is stored, run on packed tokens and stepped.

`Strategy` holds a whole model in this process, on the CPU or one CUDA device; `FSDP2Strategy`
shards it over ranks, and overrides how the weights are stored. Weights and activations have the
model's dtype. A bf16 model is stepped on fp32 master weights: gradients of micro-batches are summed
in fp32, AdamW works in fp32, and the result is rounded to bf16 after each step, so that updates
smaller than a bf16 step are not lost.

Shapes: `T` packed tokens of a micro-batch, `S` of them scored, `B` its samples, `H` width.
Everything a strategy returns per token is aligned with `MicroBatch.token_ids`: entry t is about
token t given those before it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from winnow.errors import CheckpointError, ConfigError, ModelError
from winnow.learning.balance import LEAST_REPEATED
from winnow.learning.batch import (
    NO_SHARDING,
    Batch,
    MicroBatch,
    MicroBatchSharder,
    all_micro_batches,
    pack_sequences,
)
from winnow.learning.images import EncodedImages
from winnow.learning.runner import ModelRunner, Output, Outputs
from winnow.models.causal_lm import decoder_layers, text_model
from winnow.models.compiled_layers import CompiledLayers
from winnow.models.folders import has_adapter
from winnow.models.fused_layers import fuse_layers
from winnow.models.lora import (
    adapter_dropouts,
    adapter_off,
    adapter_weights,
    is_adapter_weight,
    merged_weights,
)
from winnow.models.packed_attention import attention_operations
from winnow.models.routing import ExpertLoad, routing_of
from winnow.types import ROUTES, IntArray

log = logging.getLogger(__name__)

Stats = dict[str, float]
HALF = (torch.bfloat16, torch.float16)
"""Types whose weights are stepped as fp32 masters."""


@dataclass(frozen=True, eq=False)
class LossResult:
    """The loss and diagnostics of one micro-batch."""

    loss: Tensor
    """Scalar, already divided by the update's counts, so that micro-batches add up."""
    sums: Mapping[str, Tensor]
    """Diagnostics as sums over tokens or samples; the caller divides by the update's counts."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Diagnostics whose largest value over all micro-batches and ranks counts."""


LossFn = Callable[[MicroBatch, Outputs], LossResult]


class Figures:
    """The losses and diagnostics of micro-batches, added up on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, result: LossResult) -> None:
        """Count a micro-batch."""
        for name, value in {"loss": result.loss, **result.sums}.items():
            value = value.detach().to(result.loss.device, torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in result.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def numbers(self) -> tuple[Stats, Stats]:
        """Return sums and maxima; waits for the device, once."""
        tensors = [*self._sums.values(), *self._maxima.values()]
        numbers = iter(torch.stack([x.double() for x in tensors]).tolist() if tensors else ())
        return {n: next(numbers) for n in self._sums}, {n: next(numbers) for n in self._maxima}


class Strategy:
    """Hold a model of `winnow.models`, and AdamW for the parameters that require gradients.

    A frozen model has no optimizer state. The model stays in evaluation mode (no dropout but an
    adapter's own) and is changed in place; an engine beside it may share the weights. On the CPU
    its norms and feed-forward layers are fused. The private methods before `forward` are a
    subclass's to override. `tests/contract/test_strategy.py` checks what is promised here.

    A causal LM offers `logprob`, `entropy` and `prob_square_sum`, a value model `value`, a reward
    model `score`.

    Args:
        device: where it computes; None takes the model's.
        temperature: of the policy whose log-probs are computed.
        betas, eps, weight_decay: AdamW's; every trained parameter decays, as in torch.
        grad_clip: bound on the norm of the whole gradient; None leaves it.
        vocab_size: ids the tokenizer has, the rest of the head gets no probability; None means all.
        logprob_chunk_tokens: tokens whose logits exist at once; None chooses by both.
        gradient_checkpointing: recompute activations in the backward pass.
        recompute_attention: recompute those of attention, too; False keeps its outputs.
        fp32_head: compute a half-precision model's logits in fp32.
        compiles: compile the model's blocks; nothing is fused then, and no expert counted. None
            compiles those of a dense model on CUDA, and warns where that fails.
        replays_routes: send tokens to the experts of the column `routes`, in every pass whose
            micro-batches have it.

    Raises:
        ConfigError: they cannot be compiled here.
        ModelError: the model's routers cannot be given their choice.
    """

    sharder: MicroBatchSharder = NO_SHARDING
    """Splits a batch over the ranks that hold the model, and shares its prompts where it can."""
    kernels: ClassVar[str | None] = None
    """Type of device whose kernels and layers are chosen; None is that of the model's own."""
    step_threads: int | None = None
    """CPU threads of an optimizer step; None takes those of all else. The bits are the same."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | None = None,
        temperature: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        vocab_size: int | None = None,
        logprob_chunk_tokens: int | None = None,
        gradient_checkpointing: bool = False,
        recompute_attention: bool = True,
        fp32_head: bool = False,
        compiles: bool | None = False,
        replays_routes: bool = False,
    ) -> None:
        self.model = model
        self._routing = None if compiles else routing_of(model, replays_routes)
        self.replayed = self._routing.shape if self._routing and replays_routes else None
        """The shape of a token's entry in the column `routes`, where that is replayed."""
        self.device = device or next(model.parameters()).device
        """The device it computes on."""
        self._grad_clip = grad_clip
        readout = temperature, vocab_size, logprob_chunk_tokens, fp32_head
        self._runner = self._make_runner(model, *readout, self.kernels)
        # The engine routes each answer's prompt by itself.
        can_share = self.replayed is None and self._runner.can_share_prompts(self.device)
        self.sharder = self.sharder.sharing_prompts(LEAST_REPEATED if can_share else math.inf)
        self._compiled = self._add_faster_layers(compiles)
        self._training_only = adapter_dropouts(model)
        if gradient_checkpointing:
            checkpoint: dict[str, Any] = {"use_reentrant": False}
            if not recompute_attention:
                kept = attention_operations()
                checkpoint["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
            cast(Any, model).gradient_checkpointing_enable(checkpoint)
            self._training_only += decoder_layers(model)
        self._rounded: dict[str, torch.dtype] = {}
        """Types that exported masters are rounded to, by parameter."""
        self._masters = self._place_weights()
        self._optimizer = torch.optim.AdamW(
            # An optimizer of nothing wants a group, and steps it in vain.
            [{"params": list(self._masters.values())}],
            lr=0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def _make_runner(self, model: nn.Module, *readout: Any) -> ModelRunner:
        return ModelRunner(model, *readout)

    def _add_faster_layers(self, compiles: bool | None) -> CompiledLayers | None:
        """Put faster layers into the model; returns those that are compiled, if they are."""
        kernels = self.kernels or self.device.type
        if compiles or (compiles is None and kernels == "cuda" and self._routing is None):
            try:
                return CompiledLayers(decoder_layers(text_model(self.model)), self.device)
            except ConfigError as error:
                if compiles:
                    raise
                log.warning("The model's blocks run uncompiled: %s", error)
        if kernels == "cpu":
            fuse_layers(self.model)
        return None

    def _place_weights(self) -> dict[str, nn.Parameter]:
        """Place the weights, and return what the optimizer steps, by parameter name."""
        named = self.model.named_parameters()
        return {name: _fp32_master(p) for name, p in named if p.requires_grad}

    @contextlib.contextmanager
    def _pass_context(self) -> Iterator[None]:
        """Surround the passes of some micro-batches."""
        yield

    def _compiled_blocks(self) -> AbstractContextManager[None]:
        """Have the model's blocks run compiled, where that is chosen."""
        return nullcontext() if self._compiled is None else self._compiled.active()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Add up a loss's gradients; `is_last` for the last micro-batch of a call."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _reduce_figures(self, sums: Stats, maxima: Stats) -> Stats:
        """Join the figures of all ranks."""
        stats: Stats = {}
        # A rank of empty micro-batches has no names.
        for added, largest in self.sharder.dp.all_gather((sums, maxima)):
            for name, value in added.items():
                stats[name] = stats.get(name, 0.0) + value
            for name, value in largest.items():
                # As torch.maximum: NaN is passed on.
                current = stats.get(name, value)
                stats[name] = value if math.isnan(value) or value > current else current
        return stats

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Return the 2-norm of all gradients together."""
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _fill(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of a state into one of this strategy's."""
        target.copy_(source)

    def _all_reduce(self, counts: Tensor) -> Tensor:
        """Add up integers on the device over all ranks."""
        return counts

    def _gather_tensors(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Bring each tensor's parts together."""
        return named

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        """Compute outputs without gradient, one dict a micro-batch, each value [T].

        `logprob`, `entropy` (nats), `prob_square_sum` (over the vocabulary, never with a
        gradient) and `value` are about written tokens and 0 off gen_mask: the
        value at token t is that of the state before t is written, read off the hidden state at
        t - 1 as its log-prob is. `score` stands at the last token of each sample, 0 elsewhere.
        Ranks that share the model bring the same number of micro-batches.
        """
        results = []
        with torch.no_grad(), self._pass_context(), self._compiled_blocks():
            features = self._encode_images(microbatches)
            for micro in microbatches:
                inputs = self._prepare(micro, features)
                with self._replaying(inputs):
                    values = self._run(inputs, outputs)
                results.append(values if micro.lengths else {n: v[:0] for n, v in values.items()})
        return results

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        """Accumulate gradients of the summed losses.

        Returns the loss, the summed diagnostics and the maxima over all micro-batches and ranks.
        """
        figures = Figures()
        with self._pass_context(), self._compiled_blocks(), training_mode(self._training_only):
            features = self._encode_images(microbatches)
            for number, micro in enumerate(microbatches, start=1):
                is_last = number == len(microbatches)
                inputs = self._prepare(micro, features)
                with self._replaying(inputs, counts=bool(micro.lengths)):
                    values = self._run(inputs, outputs)
                    if not micro.lengths:
                        # A loss of 0 reaches every weight: sums over ranks need all their parts.
                        learnt = [v.sum() for v in values.values() if v.requires_grad]
                        self._backward(torch.stack(learnt).sum() * 0.0, is_last)
                        continue
                    result = loss_fn(inputs, values)
                    self._backward(result.loss, is_last)
                figures.add(result)
            if features is not None:
                features.backward()
        return self._reduce_figures(*figures.numbers())

    def _encode_images(self, microbatches: Sequence[MicroBatch]) -> EncodedImages | None:
        """Run the vision tower once on each image of a pass; None if the batch has no images."""
        if not microbatches or microbatches[0].images is None:
            return None
        shown = [micro.images for micro in microbatches if micro.images]
        most = max(sum((micro.shared or micro).lengths) for micro in microbatches)
        return EncodedImages(shown, most, self.sharder.dp, self._runner)

    def _prepare(self, micro: MicroBatch, features: EncodedImages | None = None) -> MicroBatch:
        """Return the micro-batch, or a filler in the place of an empty one, on the device."""
        micro = (micro if micro.lengths else _filler()).to(self.device)
        if features is None or micro.images is None:
            return micro
        return replace(micro, images=features.put_into(micro.images))

    def _replaying(self, micro: MicroBatch, counts: bool = False) -> AbstractContextManager[None]:
        """Replay the micro-batch's routes, and count expert loads unless it is a filler."""
        if self._routing is None:
            return nullcontext()
        routes = micro.columns.get(ROUTES) if self.replayed else None
        run = micro.shared.tokens if micro.shared else micro.token_ids
        local, tokens = self._runner.local_tokens(run if routes is None else routes, -1)
        return self._routing.replaying(None if routes is None else local, tokens * counts)

    def expert_load(self) -> ExpertLoad | None:
        """Return where tokens went in `forward_backward` since the last call, over all ranks.

        None of a dense model, and of a compiled one. All ranks must call it.
        """
        if self._routing is None:
            return None
        return ExpertLoad.of(self._all_reduce(self._routing.take_counts(self.device)))

    def _run(self, micro: MicroBatch, outputs: frozenset[Output]) -> dict[Output, Tensor]:
        return cast(dict[Output, Tensor], self._runner(micro, outputs))

    def optimizer_step(self, lr: float) -> Stats:
        """Clip, step, clear the gradients. A non-finite gradient norm skips the step.

        Returns `grad_norm` (before clipping) and `skipped` (0 or 1).
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        norm = self._norm(gradients)
        skipped = not math.isfinite(norm)
        if not skipped:
            if gradients and self._grad_clip is not None and norm > self._grad_clip:
                torch._foreach_mul_([local(g) for g in gradients], self._grad_clip / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            with _cpu_threads(self.step_threads):
                self._optimizer.step()
            self._copy_masters_to_model()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "skipped": float(skipped)}

    def weights_are_finite(self) -> bool:
        """Return whether the trained weights have a finite norm; all ranks must call it."""
        return math.isfinite(self._norm([weight.detach() for weight in self._masters.values()]))

    def export_weights(
        self, dtype: torch.dtype | None = None, adapter_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole tensors, tied ones once, one gathered at a time.

        Without a cast, tensors of a single process are live; masters are rounded to the type the
        model computes in. An adapter is merged into copies of the weights it belongs to; alone it
        has PEFT's names. All ranks must take all of them.

        Raises:
            ModelError: `adapter_only`, and the model has no adapter.
        """
        named: Iterator[tuple[str, Tensor]]
        named = ((name, tensor.detach()) for name, tensor in tensors_of(self.model).items())
        if self.has_adapter:
            if adapter_only:
                named = adapter_weights(self.model)
            else:
                named = merged_weights(tensors_of(self.model), self.model)
        elif adapter_only:
            raise ModelError(
                "cannot export the adapter alone: the model has none; export all weights"
            )
        return self._gather_tensors(self._cast(named, dtype))

    def _cast(
        self, named: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            target = dtype if tensor.is_floating_point() else None
            yield name, tensor.to(target or self._rounded.get(name, tensor.dtype))

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the local part of each weight, by parameter name."""
        for name, parameter in self.model.named_parameters():
            yield name, local(parameter)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what the optimizer steps, masters of half-precision weights, by parameter name."""
        yield from self._masters.items()

    @property
    def embeddings(self) -> nn.Module | None:
        """The layer that ids go through first; None on a rank that has none."""
        return cast(nn.Module, cast(Any, self.model).get_input_embeddings())

    def local_tokens(self, values: Tensor, fill: int) -> Tensor:
        """Return values [T] of a micro-batch for the tokens that reach this rank's embeddings."""
        return self._runner.local_tokens(values, fill)[0]

    @property
    def n_parameters(self) -> int:
        """The number of its model's weights, over all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def n_active_parameters(self) -> int:
        """The number of weights that a token meets: of a layer's experts those that it goes to."""
        config = cast(Any, self.model).config.get_text_config()
        experts = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
        if not experts:
            return self.n_parameters
        named = [(".experts." in name, p.numel()) for name, p in self.model.named_parameters()]
        stacked = sum(number for is_expert, number in named if is_expert)
        chosen: int = config.num_experts_per_tok
        return self.n_parameters - stacked + stacked * chosen // int(experts)

    @property
    def has_adapter(self) -> bool:
        """True if an adapter is trained in the place of the model's own weights."""
        return has_adapter(self.model)

    def adapter_off(self) -> AbstractContextManager[None]:
        """Let the model answer without its adapter, as before training, within the block.

        Raises:
            ModelError: it has no adapter.
        """
        return adapter_off(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return fp32 masters or weights, and optimizer state, by parameter name.

        An adapted model gives the adapter's weights alone. The tensors are live: write or copy them
        before the next step. Hyperparameters are not in it; they come from the recipe.
        """
        learns = tensors_of(self.model)
        if self.has_adapter:
            learns = {name: tensor for name, tensor in learns.items() if is_adapter_weight(name)}
        weights = {name: self._masters.get(name, t).detach() for name, t in learns.items()}
        states = self._optimizer.state
        moments = {n: dict(states[m]) for n, m in self._masters.items() if m in states}
        return {"weights": weights, "optimizer": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; accumulated gradients are dropped.

        Raises:
            CheckpointError: names, shapes or dtypes are not those of this model.
        """
        weights = self.state_dict()["weights"]
        check_state(state, weights, self._masters)
        for name, tensor in weights.items():
            self._fill(tensor, state["weights"][name])
        self._copy_masters_to_model()
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        for name, moments in state["optimizer"].items():
            master = self._masters[name]
            taken = self._optimizer.state[master] = {}
            for key, value in moments.items():
                if key == "step":
                    taken[key] = value.to(local(master).device, copy=True)
                else:
                    taken[key] = torch.zeros_like(master.detach())
                    self._fill(taken[key], value)

    def _copy_masters_to_model(self) -> None:
        """Bring masters into the model, where the two are not the same tensors."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                master = self._masters.get(name, parameter)
                if master is not parameter:
                    parameter.copy_(master)


def run_pass(
    strategy: Strategy, batch: Batch, outputs: frozenset[Output], max_tokens: int
) -> dict[Output, Tensor]:
    """Run a model on the whole batch without gradients; each output is [T] on the CPU.

    All ranks that hold the model call it.
    """
    sharder = strategy.sharder
    micro = sharder.all_micro_batches(batch, max_tokens)
    results = strategy.forward(micro, outputs)
    names = sorted(outputs)  # ranks gather in step, and a set's order differs between processes
    return {n: sharder.gather(batch, micro, [values[n] for values in results]) for n in names}


def score_sequences(strategy: Strategy, sequences: Sequence[IntArray], max_tokens: int) -> Tensor:
    """Return [B] fp32 on the CPU: a reward model's number for the token ids of each sequence.

    Raises:
        ValueError: a sequence without a token.
    """
    batch = pack_sequences(sequences)
    scores = run_pass(strategy, batch, frozenset({"score"}), max_tokens)["score"]
    return scores[batch.offsets[1:] - 1].to(torch.float32)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, live; any other tensor is its own."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones under their first name, and buffers that are saved with them."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {n: t for n, t in model.state_dict().items() if n not in names}


@contextlib.contextmanager
def training_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers recompute their activations, or drop inputs, within the block and nowhere else.

    The flag is set on the layers alone, not on what they hold, so that dropout stays off.
    """
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextlib.contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    """Compute on so many CPU threads within the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _filler() -> MicroBatch:
    """Return a sequence of two tokens, for a rank that has fewer micro-batches than others."""
    return all_micro_batches(pack_sequences([np.zeros(2, np.int64)]), 2)[0]


def check_state(
    state: Mapping[str, Any], weights: Mapping[str, Tensor], trained: Container[str]
) -> None:
    """Refuse a state of another model's strategy, or of one that trained other weights.

    Raises:
        CheckpointError: names, shapes or dtypes are not those of `weights`.
    """
    saved, expected = (
        {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
        for tensors in (state["weights"], weights)
    )
    for name, moments in state["optimizer"].items():
        for key in moments.keys() - {"step"}:
            moment = f"optimizer state {key} of {name}"
            saved[moment] = f"{list(moments[key].shape)} {moments[key].dtype}"
            expected[moment] = expected.get(name, "none") if name in trained else "none"
    differ = sorted(n for n in saved.keys() | expected.keys() if saved.get(n) != expected.get(n))
    if differ:
        raise CheckpointError(
            f"the checkpoint does not match this model: {len(differ)} tensors differ, such as "
            f"{differ[0]}: {saved.get(differ[0], 'none')} in the checkpoint, "
            f"{expected.get(differ[0], 'none')} in the model; resume with the model and the "
            "trained parameters of the run that saved it"
        )


def _fp32_master(parameter: nn.Parameter) -> nn.Parameter:
    """Return what the optimizer steps: the parameter itself, or for half precision an fp32 copy.

    The copy takes over each gradient as soon as backward has it.
    """
    if parameter.dtype not in HALF:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_over(owner: Tensor) -> None:
        assert owner.grad is not None
        gradient = owner.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        owner.grad = None

    cast(Any, parameter).register_post_accumulate_grad_hook(take_over)
    return master
