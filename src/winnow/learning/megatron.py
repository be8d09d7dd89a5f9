"""One model on several ranks by Megatron's tensor, pipeline and expert parallelism.

Each rank has one stage of the model, of whose matrices it has rows or columns
(`winnow.models.megatron.stage`). A share of the batch is run by `tensor * pipeline` ranks: micro-
batches pass through their stages as Megatron's schedule (1F1B) has them, whole, and the last stage
computes log-probs and losses. The other ranks hold the same parts and run other shares.

Gradients, the optimizer and what is saved are ours. Half-precision gradients of micro-batches are
added up in fp32; after the last one each parameter's sum goes to that one of its data-parallel
ranks which owns its fp32 master and AdamW's state, is stepped there, and comes back to all (ZeRO
stage 1, arXiv 1910.02054, parameter by parameter). States and exports have the names and shapes of
the Hugging Face model, of which a rank has rectangles (`winnow.models.megatron.weights`): any other
layout can read them, and FSDP2.

Shapes as in `winnow.learning.strategy`; `n` tokens of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from winnow.algorithms.logprobs import OutputHead
from winnow.learning.batch import MicroBatch, MicroBatchSharder
from winnow.learning.data_parallel import device_of
from winnow.learning.runner import ModelRunner, Output
from winnow.learning.shards import Piece
from winnow.learning.strategy import HALF, Figures, LossFn, Stats, Strategy, check_state, tensors_of
from winnow.models.causal_lm import is_reward_model, is_value_model
from winnow.models.megatron.stage import PackedSamples, Stage, megatron_config, rotary
from winnow.models.megatron.weights import Part, RankPlace, check_layout, parts_of
from winnow.models.packed_attention import PackedLayout
from winnow.models.routing import ExpertLoad, LoadCounter, route_shape
from winnow.models.sharded_loading import saved_weights
from winnow.models.value import scalar_head
from winnow.types import ROUTES, IntArray

_MOMENTS = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class RankLayout:
    """The sizes by which ranks hold a model together, as `trainer.strategy` has them."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence_parallel: bool = True

    def ranks_by_share(self, ranks: int) -> IntArray:
        """Return the ranks that run each share of a batch, [shares, ranks].

        Megatron's order of ranks: tensor-parallel ones are neighbours, stages are farthest apart.
        """
        table = np.arange(ranks).reshape(self.pipeline, -1, self.tensor)
        return table.transpose(1, 0, 2).reshape(-1, self.pipeline * self.tensor)

    def init_groups(self) -> None:
        """Make Megatron's process groups, where there are none yet; all ranks call this."""
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=self.tensor,
                pipeline_model_parallel_size=self.pipeline,
                expert_model_parallel_size=self.expert,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
            # Megatron's layers fork a generator of this name, though nothing here is random.
            model_parallel_cuda_manual_seed(0)

    def place(self) -> RankPlace:
        """Return this rank's place, after `init_groups`."""
        return RankPlace(
            self.tensor,
            self.pipeline,
            self.expert,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )


class MegatronStrategy(Strategy):
    """Hold a model of `winnow.models` in parts on the ranks of a mesh.

    Every method is collective: all ranks of the mesh call it, in the same order.

    Args:
        model: hollow, or whole on every rank; it gives names, shapes and what is read, and is not
            run.
        mesh: of one axis.
        layout: of the ranks.
        options: as `Strategy` takes them; the model's blocks cannot be compiled.

    Raises:
        ModelError: Megatron's layers do not compute the model, it cannot be cut by this layout,
            or its weights cannot be read.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, layout: RankLayout, **options: Any
    ) -> None:
        layout.init_groups()
        self.mesh, self._layout, self._place = mesh, layout, layout.place()
        self._recomputes = bool(options.pop("gradient_checkpointing", False))
        width = int(cast(Any, model).config.hidden_size)
        self.sharder = MicroBatchSharder(mesh, width, layout.ranks_by_share(mesh.size()))
        super().__init__(model, device=device_of(mesh), **options)

    def _make_runner(self, model: nn.Module, *readout: Any) -> ModelRunner:
        return StageRunner(model, *readout, make_stage=self._make_stage)

    def _make_stage(self, has_head: bool) -> Stage:
        model, split = cast(Any, self.model), self._layout.sequence_parallel
        self._dtype = next(model.base_model.parameters()).dtype
        self._dimensions = check_layout(self.model, self._place, split)
        layout = model.config, self._dimensions, self._place
        settings = megatron_config(*layout, self._dtype, split, self._recomputes)
        return Stage(*layout, has_head, settings)

    @property
    def embeddings(self) -> nn.Module | None:
        return cast("nn.Module | None", getattr(self._stage, "embedding", None))

    def _add_faster_layers(self, compiles: bool | None) -> None:
        assert not compiles, "the recipe's rules refuse it"

    def _place_weights(self) -> dict[str, nn.Parameter]:
        runner = cast(StageRunner, self._runner)
        self._stage, self._groups = runner.stage.eval(), runner.stage.groups
        shapes = {name: tensor.shape for name, tensor in tensors_of(self.model).items()}
        self._parts = parts_of(shapes, self._dimensions, self._place)
        self._local_params = dict(runner.local_parameters())
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._read_weights()
        # Both ends of a tied embedding are summed over their owners.
        tied = self._dimensions.is_tied and self._place.pipeline > 1
        first = {"embedding.weight", "head.weight"} if tied else set[str]()
        self._owners: dict[str, int] = {}
        loads: dict[Any, list[int]] = {}
        for name, parameter in sorted(self._local_params.items(), key=lambda p: -p[1].numel()):
            parts = self._parts.get(name, [])
            parameter.requires_grad_(all(part.name in trained for part in parts))
            group = self._replicas(name)
            load = loads.setdefault(group, [0] * group.size())
            self._owners[name] = 0 if name in first else load.index(min(load))
            load[self._owners[name]] += parameter.numel()
        self._counter = self._new_counter()
        self._sums: dict[str, Tensor] = {}
        stepped = {name: p for name, p in self._local_params.items() if p.requires_grad}
        for name, parameter in stepped.items():
            if parameter.dtype in HALF:
                cast(Any, parameter).register_post_accumulate_grad_hook(self._accumulate_hook(name))
        return {
            name: nn.Parameter(p.detach().float()) if p.dtype in HALF else p
            for name, p in stepped.items()
            if self._is_owner(name)
        }

    def _read_weights(self) -> None:
        """Read this rank's parts of the model's weights."""
        weights, real = saved_weights(self.model), tensors_of(self.model)
        with torch.no_grad():
            for name, parameter in self._local_params.items():
                for part in self._parts.get(name, []):
                    source = real[part.name]
                    if 0 in part.sizes:
                        continue
                    if weights is not None and part.name in weights:
                        # As if it had been loaded in the type that the recipe names.
                        values = weights.part(part.name, part.slices).to(source.dtype)
                        if source is parameter:  # a head of one number, with a stand-in's memory
                            parameter.data = torch.empty_like(values, device=parameter.device)
                    elif source is parameter:
                        continue
                    else:
                        values = source.detach()[part.slices]
                    part.fill(parameter, values.to(parameter.device))
                if name in ("embedding.weight", "head.weight"):
                    parameter[sum(part.sizes[0] for part in self._parts.get(name, [])) :] = 0.0
        cast(Any, self.model).saved_weights = None

    def _replicas(self, name: str) -> dist.ProcessGroup:
        """Return the ranks that hold the same of a parameter and see other samples."""
        return cast(
            dist.ProcessGroup, self._groups.expt_dp if ".experts." in name else self._groups.dp
        )

    def _is_owner(self, name: str) -> bool:
        return self._replicas(name).rank() == self._owners[name]

    def _accumulate_hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that adds up a half-precision parameter's gradients in fp32."""

        def take_over(owner: Tensor) -> None:
            assert owner.grad is not None
            if name in self._sums:
                self._sums[name].add_(owner.grad)
            else:
                self._sums[name] = owner.grad.float()
            owner.grad = None

        return take_over

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        """Compute outputs without gradient, as `Strategy.forward` does, on all ranks of a share."""
        computed: list[dict[Output, Tensor]] = []

        def keep(_: MicroBatch, values: dict[Output, Tensor]) -> None:
            computed.append(values)

        with torch.no_grad():
            self._schedule(microbatches, outputs, keep, forward_only=True)
        return self._from_last_stage(computed, microbatches, outputs)

    def _from_last_stage(
        self,
        computed: list[dict[Output, Tensor]],
        microbatches: Sequence[MicroBatch],
        outputs: frozenset[Output],
    ) -> list[dict[Output, Tensor]]:
        """Broadcast the outputs of the last stage to the other stages."""
        lengths = [len(micro.token_ids) for micro in microbatches]
        tokens = sum(lengths)
        exact = torch.promote_types(self._dtype, torch.float32)
        group, names = self._groups.pp, sorted(outputs)
        whole = torch.empty(len(names), tokens, dtype=exact, device=self.device)
        if self._place.is_last and tokens:
            pairs = zip(computed, lengths, strict=True)
            rows = [torch.stack([v[n][:length] for n in names]) for v, length in pairs]
            torch.cat(rows, 1, out=whole)
        if group.size() > 1:
            dist.broadcast(whole, dist.get_global_rank(group, group.size() - 1), group=group)
        return [
            dict(zip(names, part.unbind(), strict=True))
            for part in cast(Any, whole).split(lengths, 1)
        ]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        """Accumulate gradients of the summed losses, as `Strategy.forward_backward` does."""
        figures = Figures()

        def loss(micro: MicroBatch, values: dict[Output, Tensor]) -> Any:
            uncounted = torch.zeros((), dtype=torch.int)
            if not micro.lengths:
                # A loss of 0 reaches every stage: none may wait for its gradient.
                learnt = [v.sum() for v in values.values() if v.requires_grad]
                return torch.stack(learnt).sum() * 0.0, uncounted, None
            result = loss_fn(micro.to(self.device), values)
            # Else the stages before would wait for a gradient that does not come.
            assert result.loss.requires_grad, "the loss depends on no weight"
            figures.add(result)
            return result.loss, uncounted, None

        self._stage.train()
        try:
            self._schedule(microbatches, outputs, loss, forward_only=False)
        finally:
            self._stage.eval()
        group, totals = self._groups.pp, [figures.numbers()]
        if group.size() > 1:
            last = dist.get_global_rank(group, group.size() - 1)
            dist.broadcast_object_list(totals, last, group=group)
        return self._reduce_figures(*totals[0])

    def _schedule(
        self,
        microbatches: Sequence[MicroBatch],
        outputs: frozenset[Output],
        take: Callable[[MicroBatch, dict[Output, Tensor]], Any],
        forward_only: bool,
    ) -> None:
        """Pass micro-batches through the stages; `take` gets the last one's outputs."""
        if not microbatches:
            return

        def step(batches: Iterator[MicroBatch], stage: Stage) -> tuple[Any, Any]:
            micro = next(batches)
            counter = None if forward_only or not micro.lengths else self._counter
            output = self._runner(self._prepare(micro), outputs, counter, self.replayed is not None)
            if not self._place.is_last:
                return output, None
            # The schedule expects a tensor, and hands it on.
            return next(iter(output.values())), lambda _, **__: take(micro, output)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[self._stage],
            num_microbatches=len(microbatches),
            seq_length=1,  # each micro-batch has another
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def expert_load(self) -> ExpertLoad | None:
        """Return where tokens went, as `Strategy.expert_load` does."""
        if self._counter is None:
            return None
        counts, self._counter = self._counter.counts, self._new_counter()
        dist.all_reduce(counts)
        return ExpertLoad.of(counts)

    def _new_counter(self) -> LoadCounter | None:
        shape = route_shape(self.model)
        return LoadCounter(shape, self.device) if shape.layers else None

    def optimizer_step(self, lr: float) -> Stats:
        """Bring gradients together, clip, step, clear them, as `Strategy.optimizer_step` does."""
        self._reduce()
        stats = super().optimizer_step(lr)
        for parameter in self._local_params.values():
            parameter.grad = None
        return stats

    def _reduce(self) -> None:
        """Sum up each parameter's gradient over the ranks that have parts of it, for its owner."""
        works: list[Any] = []
        sums: dict[str, Tensor] = {}
        for name, parameter in self._local_params.items():
            if not parameter.requires_grad:
                continue
            gradient = self._sums.pop(name, parameter.grad)
            if gradient is None:
                exact = torch.promote_types(parameter.dtype, torch.float32)
                gradient = torch.zeros_like(parameter, dtype=exact)
            sums[name] = gradient
            group = self._replicas(name)
            if group.size() > 1:
                owner = dist.get_global_rank(group, self._owners[name])
                works.append(dist.reduce(gradient, owner, group=group, async_op=True))
        for work in works:
            work.wait()
        # Last what several ranks have copies of: in this order all get the same bits.
        tied = "embedding.weight" if self._place.is_first else "head.weight"
        for name, master in self._masters.items():
            if self._is_partial(name, self._local_params[name]):
                dist.all_reduce(sums[name], group=self._groups.tp)
            if name == tied and self._dimensions.is_tied and self._place.pipeline > 1:
                dist.all_reduce(sums[name], group=self._groups.embd)
            master.grad = sums[name]

    def _is_partial(self, name: str, parameter: Tensor) -> bool:
        """Return whether each tensor-parallel rank has a part of a whole weight's gradient."""
        if self._place.tensor == 1:
            return False
        # Each rank has its own heads, and with sequence parallelism its own tokens.
        per_head = ".q_layernorm." in name or ".k_layernorm." in name
        return per_head or bool(getattr(parameter, "sequence_parallel", False))

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        # In double: the square of an fp32 norm of 1e20 would be infinite.
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in zip(self._masters, gradients, strict=True):
            parts = self._parts.get(name, [])
            if parts and not parts[0].is_copy:
                square += torch.linalg.vector_norm(gradient).double().square()
        dist.all_reduce(square)
        return math.sqrt(float(square))

    def _copy_masters_to_model(self) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._local_params[name]:
                    self._local_params[name].copy_(master)
        self._from_owners(name for name, p in self._local_params.items() if p.requires_grad)

    def _from_owners(self, names: Iterable[str]) -> None:
        """Bring parameters from their owners to the ranks that hold the same."""
        works: list[Any] = []
        for name in names:
            group = self._replicas(name)
            if group.size() > 1:
                owner = dist.get_global_rank(group, self._owners[name])
                data = self._local_params[name].data
                works.append(dist.broadcast(data, owner, group=group, async_op=True))
        for work in works:
            work.wait()

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the weights, by the names of the Hugging Face model."""
        for name, parameter in self._local_params.items():
            for part in self._parts.get(name, []):
                yield part.name, part.of(parameter.detach())

    def export_weights(
        self, dtype: torch.dtype | None = None, adapter_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole tensors, as `Strategy.export_weights` does."""
        assert not adapter_only, "the recipe's rules refuse adapters"
        return self._gathered(tensors_of(self.model), dtype)

    def export_trained(self) -> Iterator[tuple[str, Tensor]]:
        """Export what is trained, as `FSDP2Strategy.export_trained` does."""
        return self._gathered(self._trained_tensors())

    def _trained_tensors(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _gathered(
        self, templates: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of these shapes and dtypes, whole on every rank."""
        local = self._local_parts()
        for name, like in templates.items():
            # Bytes are summed, to which one rank each gives its part: every bit arrives.
            whole = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            parameter, part = local.get(name, (None, None))
            if part is not None and parameter is not None and not part.is_copy:
                whole[part.slices] = part.rectangle(parameter.detach())
            in_stack = ".experts." in name
            group = self._groups.tp_ep_pp if in_stack else self._groups.mp
            dist.all_reduce(whole.view(-1).view(torch.uint8), group=group)
            yield name, whole.to(dtype or like.dtype)

    def _local_parts(self) -> dict[str, tuple[nn.Parameter, Part]]:
        """Return this rank's part of each Hugging Face tensor."""
        return {
            part.name: (self._local_params[key], part)
            for key, parts in self._parts.items()
            for part in parts
        }

    def export_shards(self) -> dict[str, Tensor]:
        """Return this rank's pieces of all tensors of `export_weights`; empty ones of the rest."""
        tensors, pieces = tensors_of(self.model), dict[str, Tensor]()
        for name, like in tensors.items():
            pieces[name] = Piece.absent(like.shape, like.dtype)
        for name, parameter in self._local_params.items():
            for part in self._parts.get(name, []):
                if self._is_owner(name) and not part.is_copy:
                    pieces[part.name] = _piece(part, parameter.to(tensors[part.name].dtype))
        return pieces

    def exported_bytes(self, what: str) -> int:
        """Count the bytes of `export_weights`, or of `export_trained`."""
        tensors = self._trained_tensors() if what == "trained" else tensors_of(self.model)
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """Return pieces of fp32 masters or weights, and of optimizer state, that this rank owns.

        By the names of the Hugging Face model; live, as far as their rows lie together.
        """
        weights: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        for name, parameter in self._local_params.items():
            master = self._masters.get(name)
            if not self._is_owner(name):
                continue
            moments = self._optimizer.state.get(master, {}) if master is not None else {}
            for part in self._parts.get(name, []):
                weights[part.name] = _piece(part, parameter if master is None else master)
                if moments:
                    optimizer[part.name] = {
                        key: value if key == "step" else _piece(part, value)
                        for key, value in moments.items()
                    }
        return {"weights": weights, "optimizer": optimizer}

    def blank_state(self) -> dict[str, Any]:
        """Make room for what `state_dict` gives after a step: a checkpoint is read into it."""
        weights = {
            name: torch.zeros_like(piece) for name, piece in self.state_dict()["weights"].items()
        }
        optimizer: dict[str, Any] = {}
        for name in self._masters:
            for part in self._parts.get(name, []):
                like = weights[part.name]
                step = torch.zeros((), dtype=torch.float32)
                moments = {key: torch.zeros_like(like) for key in _MOMENTS}
                optimizer[part.name] = {"step": step, **moments}
        return {"weights": weights, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; accumulated gradients are dropped.

        Raises:
            CheckpointError: names, shapes or dtypes are not those of this rank's part.
        """
        trained = {part.name for name in self._masters for part in self._parts.get(name, [])}
        check_state(state, self.state_dict()["weights"], trained)
        self._sums.clear()
        for parameter in self._local_params.values():
            parameter.grad = None
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self._local_params.items():
                master = self._masters.get(name)
                if not self._is_owner(name):
                    continue
                for part in self._parts.get(name, []):
                    # A copy: the state may be live, and of such rows lie where others are written.
                    values = state["weights"][part.name].to_local().to(self.device, copy=True)
                    part.fill(parameter if master is None else master, values)
                    if master is not None and part.name in state["optimizer"]:
                        self._load_moments(master, part, state["optimizer"][part.name])
        self._copy_masters_to_model()
        self._from_owners(n for n, p in self._local_params.items() if not p.requires_grad)

    def _load_moments(self, master: nn.Parameter, part: Part, moments: Mapping[str, Any]) -> None:
        taken = self._optimizer.state[master]
        for key, value in moments.items():
            if key == "step":
                taken[key] = value.to(master.device, copy=True)
                continue
            if key not in taken:
                taken[key] = torch.zeros_like(master.detach())
            part.fill(taken[key], value.to_local().to(master.device))


class StageRunner(ModelRunner):
    """Run a stage on a micro-batch; the last one reads the outputs off its states.

    Args:
        model: as `MegatronStrategy` takes it.
        readout: as `ModelRunner` takes it.
        make_stage: makes the stage, of a model with or without a head.
    """

    def __init__(
        self, model: nn.Module, *readout: Any, make_stage: Callable[[bool], Stage]
    ) -> None:
        super().__init__(model, *readout)
        # Rows that pad the vocabulary are no ids.
        self._vocab_size = self._vocab_size or cast(Any, model).config.vocab_size
        has_number = is_value_model(model) or is_reward_model(model)
        self.stage = make_stage(not has_number)
        self._place_is_last = self.stage.decoder.post_process
        if has_number and self._place_is_last:
            scalar_head(model).to(next(self.stage.parameters()).device)

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank by the names of `winnow.models.megatron.weights`."""
        yield from self.stage.named_parameters()
        if self._place_is_last and (self._gives_value or self._gives_score):
            for name, parameter in scalar_head(self.model).named_parameters():
                yield f"score.{name}", parameter

    def forward(  # type: ignore[override]  # it has no vision tower
        self,
        micro: MicroBatch,
        outputs: frozenset[Output],
        counter: LoadCounter | None = None,
        replays: bool = False,
    ) -> Any:
        """Return the outputs, as `ModelRunner` does; on other stages than the last the states.

        Args:
            counter: counts where a mixture's tokens go.
            replays: send them where the column `routes` says.
        """
        self._counter, self._replays = counter, replays
        if self._place_is_last:
            return super().forward(micro, outputs)
        return self._staged(micro)

    def _staged(self, micro: MicroBatch) -> Tensor:
        layout = PackedLayout(micro.contexts, micro.token_ids.device, self._kernels)
        dtype = self.stage.config.params_dtype
        cos, sin = rotary(self.model, micro.positions, dtype)
        routes = micro.columns.get(ROUTES) if self._replays else None
        local, tokens = self.stage.local_tokens(micro.token_ids if routes is None else routes, -1)
        routes = None if routes is None else local
        samples = PackedSamples(layout, cos, sin, routes, self._counter, tokens)
        return cast(Tensor, self.stage(micro.token_ids, samples))

    def _states(self, micro: MicroBatch, at: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        whole = self.stage.whole(self._staged(micro), len(micro.token_ids))
        return whole.index_select(0, at - shift), at

    def can_share_prompts(self, device: torch.device) -> bool:
        return False

    def _head(self) -> OutputHead:
        return OutputHead(self.stage.head_weight, group=self.stage.groups.tp)


def _piece(part: Part, tensor: Tensor) -> Piece:
    return Piece(part.rectangle(tensor.detach()), part.shape, part.offsets)
