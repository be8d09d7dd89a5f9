"""One of the processes that score (`reward.processes`): loads what a recipe names, and answers."""

from __future__ import annotations

from winnow.config.judge import NoRewardModel
from winnow.config.reward import share_of
from winnow.config.root import Config
from winnow.data.text import decoder
from winnow.data.tokenizer import load_tokenizer
from winnow.rewards.panel_worker import PipelineWorker
from winnow.runs.rewarding import make_panel
from winnow.workers.protocol import RankInfo


class RewardWorker(PipelineWorker):
    """A `PipelineWorker` that makes its panel; a worker of a `WorkerGroup`.

    Args:
        rank: its place; the device is the reward model's.
        config: the recipe.
        tokenizer: its folder; reads answers.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
    """

    def __init__(self, rank: RankInfo, config: Config, tokenizer: str) -> None:
        index = rank.device_index
        device = "cpu" if index is None else f"cuda:{index}"
        if config.run.threads is not None and not isinstance(config.reward.model, NoRewardModel):
            import torch  # which takes its time, and rules do without

            torch.set_num_threads(config.run.threads)
        given = config.model.tokenizer
        field = "model.tokenizer" if given else "model.path"
        read = load_tokenizer(tokenizer, config.model.trust_remote_code, field)
        own = config.model_copy(update={"reward": share_of(config.reward)})
        super().__init__(make_panel(own, device, decoder(read)))
