"""Rules across sections: each contradiction names both fields, their values and a remedy."""

from __future__ import annotations

import pytest

from winnow.config.load import load_recipe
from winnow.config.rules import notices
from winnow.errors import ConfigError

FILES = ["warm_start=none", "data/task=none", "model.path=M"]
SFT = [*FILES, "sft.name=demonstrations", "sft.train_files=[a.jsonl]"]
JUDGED = ["reward/model=sequence_classifier", "reward.model.path=R"]
ASKED = ["reward/judge=openai", "reward.judge.base_url=http://h/v1", "reward.judge.model=M"]
FUSED = ["algorithm.correction.mode=fused", "trainer.mini_batch_groups=null"]
POOLED = ["cluster=ray", "trainer/strategy=fsdp2", "cluster.roles.policy=a"]
UNCHUNKED = ["rollout/engine=vllm", "rollout.engine.chunked_prefill=false"]
SPLIT = ["rollout/engine=vllm", "rollout.engine.tensor_parallel=2"]
ASLEEP = ["rollout/engine=vllm", "rollout.engine.sleep=true", "run.device=auto"]
POOL = "cluster.pools.a.per_node=2"
SIX = "trainer/strategy=megatron", "trainer.strategy.ranks=6"
EIGHT = "trainer/strategy=megatron", "trainer.strategy.ranks=8"
GIVEN = [*FILES, "data.train_files=[a.parquet]", *EIGHT]
JUDGING = ["reward/judge=engine", "reward.judge.path=J"]
JUDGING_SPLIT = [*JUDGING, "reward/judge/engine=vllm", "reward.judge.engine.tensor_parallel=2"]
SCORED = [
    *("reward/model=sequence_classifier", "reward.model.path=R", "reward/model/strategy=fsdp2")
]
ALONE = "model/adapter=lora", "model.adapter.publish=adapter"
SERVED = "rollout/engine=http", "rollout.engine.url=[http://a]", "run.deterministic=false"
# Overrides of the quickstart that contradict each other, what the line must say, and a way out.
CASES = [
    (
        ["data.columns.truth=none"],
        ["data.columns.truth=none leaves", "reward.function.path=FILE.py"],
        ["data.columns.truth=none", "reward.function.path=mine.py"],
    ),
    (
        ["data.columns.prompt=a", "data.prompt_key=b"],
        ["data.columns.prompt=a", "data.prompt_key=b", "leave data.prompt_key out"],
        ["data.columns.prompt=a"],
    ),
    (
        ["rollout.n=1"],
        ["rollout.n=1", "sampling/filter=variance", "algorithm/advantage=grpo", "2 or more"],
        ["rollout.n=1", "sampling/filter=none"],
    ),
    (
        ["reward.overlong.buffer_tokens=200"],
        ["reward.overlong.buffer_tokens=200", "rollout.max_response_tokens=128", "at most 128"],
        ["reward.overlong.buffer_tokens=128"],
    ),
    (
        ["trainer.mini_batch_groups=15"],
        ["sampling.groups_per_step=64", "trainer.mini_batch_groups=15", "such as 16"],
        ["trainer.mini_batch_groups=null"],
    ),
    (
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=4", "trainer.strategy.replicas=3"],
        ["trainer.strategy.ranks=4", "trainer.strategy.replicas=3", "a divisor"],
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=4", "trainer.strategy.replicas=2"],
    ),
    (
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=4", "trainer.strategy.sequence=3"],
        ["trainer.strategy.ranks=4", "trainer.strategy.sequence=3", "a divisor of ranks"],
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=4", "trainer.strategy.sequence=4"],
    ),
    (
        ["trainer.strategy.sequence=2"],
        ["trainer.strategy.sequence is no key of trainer/strategy=single", "fsdp2"],
        ["trainer/strategy=fsdp2", "trainer.strategy.sequence=2"],
    ),
    (
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=8", "trainer.strategy.sequence=8"],
        ["trainer.strategy.sequence=8", "warm_start.model.heads=4", "a divisor"],
        ["trainer/strategy=fsdp2", "trainer.strategy.ranks=8", "trainer.strategy.sequence=4"],
    ),
    (
        [*SIX, "trainer.strategy.tensor=2", "trainer.strategy.pipeline=2"],
        ["ranks=6", "trainer.strategy.tensor=2 x", "pipeline=2 ranks", "a multiple of 4"],
        [*EIGHT, "trainer.strategy.tensor=2", "trainer.strategy.pipeline=2"],
    ),
    (
        [*GIVEN, "trainer.strategy.pipeline=2", "trainer.strategy.expert=8"],
        ["trainer.strategy.expert=8", "the 4 ranks", "ranks=8", "pipeline=2", "a divisor"],
        [*GIVEN, "trainer.strategy.pipeline=2", "trainer.strategy.expert=4"],
    ),
    (
        [
            *(*GIVEN, "trainer.strategy.tensor=2", "trainer.strategy.expert=2"),
            "trainer.strategy.sequence_parallel=false",
        ],
        ["expert=2", "tensor=2 need trainer.strategy.sequence_parallel=true", "tensor=1"],
        [*GIVEN, "trainer.strategy.tensor=2", "trainer.strategy.expert=2"],
    ),
    (
        [*EIGHT, "trainer.strategy.tensor=8"],
        ["trainer.strategy.tensor=8", "warm_start.model.heads=4", "a divisor"],
        [*EIGHT, "trainer.strategy.tensor=4"],
    ),
    (
        [*EIGHT, "trainer.strategy.pipeline=4"],
        ["trainer.strategy.pipeline=4", "warm_start.model.layers=2", "2 or less"],
        [*EIGHT, "trainer.strategy.pipeline=2"],
    ),
    (
        [*EIGHT, "trainer.strategy.expert=2"],
        ["trainer.strategy.expert=2", "warm_start=sft has none", "set it to 1"],
        [*EIGHT],
    ),
    (
        [*EIGHT, "model/adapter=lora"],
        ["trainer/strategy=megatron", "model/adapter=lora", "set trainer/strategy=fsdp2"],
        ["trainer/strategy=fsdp2", "model/adapter=lora"],
    ),
    (
        [*EIGHT, "trainer.strategy.compile=true"],
        ["trainer.strategy.compile is no key of trainer/strategy=megatron", "fsdp2"],
        ["trainer/strategy=fsdp2", "trainer.strategy.compile=true"],
    ),
    (
        ["cluster=ray", "cluster.nodes=3", *EIGHT],
        ["trainer.strategy.ranks=8", "cluster.nodes=3"],
        ["cluster=ray", "cluster.nodes=4", *EIGHT],
    ),
    (
        [*ASLEEP, "run.device=cpu"],
        ["rollout.engine.sleep=true and run.device=cpu", "set rollout.engine.sleep=false"],
        ASLEEP,
    ),
    (
        [*ASLEEP, "trainer/mode=one_step_off"],
        ["rollout.engine.sleep=true and trainer/mode=one_step_off"],
        ["rollout/engine=vllm", "trainer/mode=one_step_off"],
    ),
    (
        [*POOLED, POOL, "cluster.address=auto", "cluster.init.num_cpus=4"],
        ["cluster.init is for an instance", "cluster.address=auto is there already"],
        [*POOLED, POOL, "cluster.init.num_cpus=4"],
    ),
    (
        [*POOLED, POOL, "cluster.runtime_env={pip: [six], conda: base}"],
        ["cluster.runtime_env.pip and cluster.runtime_env.conda exclude", "leave conda out"],
        [*POOLED, POOL, "cluster.runtime_env.pip=[six]"],
    ),
    (
        [*POOLED, POOL, "cluster.environment={A: b}", "cluster.runtime_env.env_vars={A: c}"],
        ["cluster.environment.A=b and cluster.runtime_env.env_vars.A=c differ", "leave one out"],
        [*POOLED, POOL, "cluster.environment={A: b}", "cluster.runtime_env.env_vars={A: b}"],
    ),
    (
        ["cluster=ray"],
        ["cluster=ray has nothing to place", "trainer/strategy=fsdp2", "cluster=local"],
        ["cluster=ray", "rollout/engine=vllm"],
    ),
    (
        ["cluster=ray", "cluster.nodes=3", "trainer/strategy=fsdp2", "trainer.strategy.ranks=4"],
        ["trainer.strategy.ranks=4", "cluster.nodes=3", "a divisor"],
        ["cluster=ray", "cluster.nodes=2", "trainer/strategy=fsdp2", "trainer.strategy.ranks=4"],
    ),
    (
        [*POOLED, POOL, "cluster.nodes=2"],
        ["cluster.nodes=2", "cluster.pools has a;", "set nodes of the pool"],
        [*POOLED, "cluster.pools.a.nodes=2"],
    ),
    (
        [*POOLED],
        [
            "cluster.roles.policy=a has 0 slots",
            "trainer.strategy.ranks asks for 2",
            "per_node is 2",
        ],
        [*POOLED, POOL],
    ),
    (
        [*POOLED, POOL, "rollout.engine.processes=1"],
        ["cluster.roles.rollout=null has 0", "rollout.engine.processes asks for 1", "name a pool"],
        [*POOLED, POOL, "rollout.engine.processes=2", "cluster.roles.rollout=a"],
    ),
    (
        [*POOLED, POOL, "cluster.roles.rollout=a"],
        [
            "cluster.roles.rollout=a has 2 slots",
            "rollout.engine.processes asks for 0",
            "null for 0",
        ],
        [*POOLED, POOL, "cluster.roles.rollout=a", "rollout.engine.processes=2"],
    ),
    (
        [*POOLED, POOL, *SPLIT, "rollout.engine.processes=2", "cluster.roles.rollout=a"],
        ["tensor_parallel=2", "cluster.roles.rollout=a shares with policy", "of its own"],
        [*POOLED, POOL, *SPLIT, "cluster.pools.b.cpus=1", "cluster.roles.rollout=b"],
    ),
    (
        [*POOLED, POOL, "cluster.pools.a.nodes=2"],
        ["cluster.roles.policy=a has 4 slots", "trainer.strategy.ranks asks for 2", "x per_node"],
        [*POOLED, POOL, "cluster.pools.a.nodes=2", "trainer.strategy.ranks=4"],
    ),
    (
        [*SCORED, "reward.processes=2"],
        ["reward.processes=2 hold a whole reward model", "reward/model/strategy=single"],
        SCORED,
    ),
    (
        [*SCORED, "reward.model.strategy.replicas=3"],
        ["reward.model.strategy.ranks=2 cannot", "reward.model.strategy.replicas=3", "divisor"],
        [*SCORED, "reward.model.strategy.replicas=2"],
    ),
    (
        [*SCORED, *POOLED, POOL],
        [
            "cluster.roles.reward_model=null has 0 slots",
            "reward.model.strategy.ranks asks for 2",
            "per_node is 2",
        ],
        [*SCORED, *POOLED, POOL, "cluster.roles.reward_model=a"],
    ),
    (
        [*JUDGING, "reward.processes=2"],
        ["reward.processes=2 and reward/judge=engine exclude", "set reward.processes=0"],
        JUDGING,
    ),
    (
        [*JUDGING, *POOLED, POOL],
        ["cluster.roles.judge=null has 0 slots", "reward.judge.engine.processes asks for 1"],
        [*JUDGING, *POOLED, POOL, "cluster.pools.b.cpus=1", "cluster.roles.judge=b"],
    ),
    (
        [*JUDGING_SPLIT, "reward.judge.engine.processes=2", *POOLED, POOL, "cluster.roles.judge=a"],
        ["reward.judge.engine.tensor_parallel=2", "cluster.roles.judge=a shares with policy"],
        [*JUDGING_SPLIT, *POOLED, POOL, "cluster.pools.b.cpus=1", "cluster.roles.judge=b"],
    ),
    (
        [*POOLED, POOL, "reference/strategy=fsdp2", "algorithm/kl/loss=fixed"],
        ["cluster.roles.reference=null has 0 slots", "reference.strategy.ranks asks for 2"],
        [*POOLED, POOL, "reference/strategy=fsdp2"],
    ),
    (
        ["reference/strategy=fsdp2", "reference.strategy.replicas=4"],
        ["reference.strategy.ranks=2 cannot", "reference.strategy.replicas=4", "divisor"],
        ["reference/strategy=fsdp2", "reference.strategy.replicas=2"],
    ),
    (
        [*POOLED, POOL, "critic/strategy=fsdp2", "algorithm/advantage=gae"],
        ["cluster.roles.critic=null has 0 slots", "critic.strategy.ranks asks for 2"],
        [*POOLED, POOL, "critic/strategy=fsdp2"],
    ),
    (
        ["critic/strategy=fsdp2", "critic.strategy.replicas=4"],
        ["critic.strategy.ranks=2 cannot", "critic.strategy.replicas=4", "divisor"],
        ["critic/strategy=fsdp2", "critic.strategy.replicas=2"],
    ),
    (
        [*POOLED, POOL, "cluster.pools.b.per_node=2"],
        ["cluster.pools.b has no role", "name it in cluster.roles"],
        [*POOLED, POOL],
    ),
    (
        ["trainer/mode=one_step_off", "rollout.engine.processes=0"],
        ["trainer/mode=one_step_off", "rollout.engine.processes=0", "processes=1 or more"],
        ["trainer/mode=one_step_off"],
    ),
    (
        ["trainer/mode=one_step_off", "rollout/engine=custom", "rollout.engine.path=mine.py:Mine"],
        ["trainer/mode=one_step_off", "rollout/engine=custom", "trainer/mode=sync"],
        [
            *("trainer/mode=one_step_off", "rollout/engine=http", "run.deterministic=false"),
            "rollout.engine.url=http://127.0.0.1:8000",
        ],
    ),
    (
        ["trainer/mode=async"],
        ["trainer/mode=async", "run.deterministic=true", "set run.deterministic=false"],
        ["trainer/mode=async", "run.deterministic=false"],
    ),
    (
        ["trainer/mode=one_step_off", "sampling.max_staleness=0"],
        ["trainer/mode=one_step_off", "sampling.max_staleness=0", "to 1 or more"],
        ["trainer/mode=one_step_off", "sampling.max_staleness=1"],
    ),
    (
        ["trainer/mode=one_step_off", "sampling.commit=completion_order"],
        ["trainer/mode=one_step_off", "set sampling.commit=admission_order"],
        ["sampling.commit=completion_order"],
    ),
    (
        ["rollout/engine=vllm", "rollout.engine.processes=0"],
        ["rollout.engine.processes=0", "rollout/engine=vllm", "rollout.engine.processes=1 or more"],
        ["rollout/engine=vllm"],
    ),
    (
        ["rollout/engine=vllm", "rollout.engine.extra.max_num_seqs=8"],
        ["rollout.engine.extra.max_num_seqs", "set rollout.engine.slots"],
        ["rollout/engine=vllm", "rollout.engine.extra.enforce_eager=true"],
    ),
    (
        ["rollout/engine=vllm", "rollout.engine.extra.logprobs_mode=raw_logprobs"],
        ["rollout.engine.extra.logprobs_mode", "leave it out"],
        ["rollout/engine=vllm", "rollout.engine.extra={compilation_config: {level: 3}}"],
    ),
    (
        ["rollout/engine=vllm", "rollout.engine.extra.worker_cls=mine.Worker"],
        ["rollout.engine.extra.worker_cls", "leave it out"],
        ["rollout/engine=vllm"],
    ),
    *(
        (
            ["rollout/engine=vllm", f"rollout.engine.extra={{{option}: {{{key}: mine.py}}}}"],
            [f"extra.{option}", key * (option == "compilation_config"), "leave it out"],
            ["rollout/engine=vllm"],
        )
        for option, key in (
            ("structured_outputs_config", "reasoning_parser_plugin"),
            ("kv_transfer_config", "kv_connector_module_path"),
            ("ec_transfer_config", "ec_connector_module_path"),
            ("speculative_config", "model"),
            ("logging_config", "pylogging_config_file"),
            ("model_class_overrides", "Qwen3ForCausalLM"),
            ("compilation_config", "backend"),
            ("compilation_config", "inductor_passes"),
        )
    ),
    (
        [*UNCHUNKED, "rollout.engine.prefill_tokens=1151"],
        ["chunked_prefill=false", "prefill_tokens=1151", "to 1152 or more"],
        [*UNCHUNKED, "rollout.engine.prefill_tokens=1152"],
    ),
    (
        ["sampling.lookahead=1.5"],
        ["sampling.lookahead=1.5", "sampling.max_staleness=1", "to 1 or less"],
        ["sampling.lookahead=1.5", "sampling.max_staleness=2"],
    ),
    (
        ["sampling.max_groups_per_step=63"],
        ["sampling.max_groups_per_step=63", "sampling.groups_per_step=64", "64 or more"],
        ["sampling.max_groups_per_step=64"],
    ),
    (
        ["warm_start=none", "data/task=none", "model.path=M"],
        ["data.train_files", "data/task=none", "set data.train_files=[FILE.parquet]"],
        [*FILES, "data.train_files=[a.parquet]"],
    ),
    (
        ["data.train_files=[a.parquet]"],
        ["data.train_files=['a.parquet']", "data/task=sort_digits", "set data.train_files=[]"],
        ["data.train_files=[]"],
    ),
    (
        ["warm_start=none"],
        ["model.path is null", "warm_start=none", "set model.path=FOLDER"],
        ["warm_start=none", "model.path=M"],
    ),
    (
        ["model.path=M"],
        ["model.path=M", "warm_start=sft", "set model.path=null or warm_start=none"],
        ["model.path=M", "warm_start=none"],
    ),
    (
        ["model.tokenizer=T"],
        ["model.tokenizer=T", "warm_start=sft", "set model.tokenizer=null"],
        ["model.tokenizer=T", "model.path=M", "warm_start=none"],
    ),
    (
        ["data/task=none", "data.train_files=[a.parquet]"],
        ["warm_start=sft", "data/task=none", "choose data/task=sort_digits"],
        [*FILES, "data.train_files=[a.parquet]"],
    ),
    (
        ["rollout.top_p=0.9"],
        ["rollout.top_p=0.9", "rollout.support=error", "set rollout.support=ignore"],
        ["rollout.top_p=0.9", "rollout.support=ignore"],
    ),
    (
        ["rollout.top_k=5", "rollout.min_p=0.1"],
        ["rollout.top_k=5 and rollout.min_p=0.1", "set rollout.support=ignore"],
        ["rollout.top_k=5", "rollout.min_p=0.1", "rollout.support=ignore"],
    ),
    (
        ["algorithm.aggregation_norm_tokens=9"],
        ["algorithm.aggregation_norm_tokens=9", "algorithm.aggregation=token-mean", "to null"],
        ["algorithm.aggregation_norm_tokens=9", "algorithm.aggregation=seq-mean-token-sum-norm"],
    ),
    (
        ["data.task.min_digits=9"],
        ["data.task.min_digits=9", "data.task.max_digits=8", "lower the one"],
        ["data.task.min_digits=8"],
    ),
    (
        ["warm_start.demonstrations.working_share=0.6"],
        ["guess_share=0.5", "working_share=0.6", "lower one"],
        ["warm_start.demonstrations.working_share=0.5"],
    ),
    (
        ["sampling/filter=band", "sampling.filter.low=0.9", "sampling.filter.high=0.1"],
        ["sampling.filter.low=0.9", "sampling.filter.high=0.1", "raise the other"],
        ["sampling/filter=band", "sampling.filter.low=0.5", "sampling.filter.high=0.5"],
    ),
    (
        ["rollout.n=1", "sampling.filter={name: band, low: 0.2, high: 0.8}"],
        ["rollout.n=1", "sampling.filter.low=0.2", "sampling.filter.high=0.8", "no group pass"],
        ["rollout.n=1", "sampling.filter={name: band, low: 0.2, high: 1}"],
    ),
    (
        ["reward.function.path=f.py", "reward.scorers.a=gsm8k"],
        ["reward.function.path=f.py", "reward.scorers (a)", "set reward.function.path=null"],
        ["reward.function.path=f.py"],
    ),
    (
        ["trainer.keep_best=eval/x/pass@1", "evaluation.every=15"],
        ["trainer.keep_best=", "trainer.save_every=10", "evaluation.every=15", "a multiple of"],
        ["trainer.keep_best=eval/x/pass@1", "evaluation.every=15", "trainer.save_every=5"],
    ),
    (
        ["trainer.keep_best=eval/x/pass@1", *FILES, "data.train_files=[a.parquet]"],
        ["trainer.keep_best=eval/x/pass@1", "data.eval_files is empty", "keep_best=null"],
        [
            *("trainer.keep_best=eval/x/pass@1", *FILES, "data.train_files=[a.parquet]"),
            "data.eval_files=[b.parquet]",
        ],
    ),
    *(
        (
            [*SFT, f"data.{key}={value}"],
            [f"data.{key}={value} chooses among the prompts", f"set data.{key}=null"],
            SFT,
        )
        for key, value in (("max_train_prompts", "5"), ("sampler", "mine.py:Mine"))
    ),
    (
        [*SFT, "trainer.keep_best=sft/held_out_loss", "trainer.save_every=10"],
        ["trainer.keep_best=sft/held_out_loss is a figure", "data.eval_files is empty"],
        [
            *(*SFT, "trainer.keep_best=sft/held_out_loss", "trainer.save_every=10"),
            *("sft.eval_files=[b.jsonl]", "evaluation.every=10"),
        ],
    ),
    (
        ["algorithm.correction.mode=fused", "trainer.mini_batch_groups=16"],
        ["algorithm.correction.mode=fused", "trainer.mini_batch_groups=16", "mode=recompute"],
        ["algorithm.correction.mode=fused", "trainer.mini_batch_groups=null", "trainer.epochs=1"],
    ),
    (
        [
            *("algorithm.correction.mode=bypass", "algorithm/policy_loss=reinforce"),
            "algorithm.correction.weight={name: truncated, normalize: true}",
        ],
        ["algorithm.correction.weight.normalize=true", "mode=bypass", "set normalize=false"],
        ["algorithm.correction.weight={name: truncated, normalize: true}"],
    ),
    (
        ["algorithm.correction.mode=bypass", "algorithm/correction/weight=truncated"],
        ["algorithm/correction/weight=truncated", "mode=bypass", "policy_loss=ppo_clip"],
        ["algorithm.correction.mode=bypass"],
    ),
    (
        ["algorithm.correction.weight={name: masked, low: 3, high: 2}"],
        ["algorithm.correction.weight.low=3", "algorithm.correction.weight.high=2", "lower the"],
        ["algorithm.correction.weight={name: masked, low: 1, high: 2}"],
    ),
    (
        ["algorithm.correction.rejection={name: k1, low: 3}"],
        ["algorithm.correction.rejection.low=3", "algorithm.correction.rejection.high=2"],
        ["algorithm.correction.rejection={name: k1, low: 1}"],
    ),
    (
        ["algorithm.kl.reward={name: adaptive, horizon_samples: 102}"],
        ["horizon_samples=102", "sampling.groups_per_step=64", "rollout.n=8", "set it to 103"],
        ["algorithm.kl.reward={name: adaptive, horizon_samples: 103}"],
    ),
    (
        ["algorithm/policy_loss=gspo"],
        ["algorithm/policy_loss=gspo", "algorithm.aggregation=token-mean", "seq-mean-token-mean"],
        ["algorithm/policy_loss=gspo", "algorithm.aggregation=seq-mean-token-mean"],
    ),
    (
        ["algorithm/advantage=grpo_passk", "rollout.n=1", "sampling/filter=none"],
        ["algorithm/advantage=grpo_passk", "rollout.n=1", "2 or more"],
        ["algorithm/advantage=grpo_passk", "sampling/filter=none"],
    ),
    (
        ["algorithm.correction.mode=bypass", "algorithm/advantage=optimal_token_baseline"],
        ["optimal_token_baseline needs squared", "mode=bypass", "mode=recompute"],
        ["algorithm/advantage=optimal_token_baseline"],
    ),
    (
        [*FUSED, "algorithm/kl/reward=fixed"],
        ["algorithm/kl/reward=fixed", "mode=fused", "mode=recompute"],
        ["algorithm/kl/reward=fixed", "algorithm.correction.mode=bypass"],
    ),
    (
        [*FUSED, "algorithm/policy_loss=clip_cov"],
        ["algorithm/policy_loss=clip_cov", "mode=fused", "mode=recompute"],
        ["algorithm/policy_loss=clip_cov"],
    ),
    (
        ["algorithm/advantage=gdpo", "algorithm/kl/reward=adaptive"],
        ["algorithm/kl/reward=adaptive", "algorithm/advantage=gdpo", "algorithm/kl/loss=fixed"],
        ["algorithm/advantage=gdpo", "algorithm/kl/loss=fixed"],
    ),
    (
        ["reward.scorers={sort_digits: none}"],
        ["reward.scorers.sort_digits=none", "reward/model=none", "sequence_classifier"],
        ["reward.scorers={sort_digits: none}", *JUDGED],
    ),
    (
        ["reward.weights.task=0"],
        ["reward.weights.task=0 and reward/model=none", "to another number"],
        ["reward.weights.task=0", "algorithm/advantage=gdpo"],
    ),
    (
        ["reward.weights.task=0", "reward.model.weight=0", *JUDGED],
        ["reward.weights.task=0 and reward.model.weight=0 leave", "to another number"],
        ["reward.weights.task=0", *JUDGED],
    ),
    (
        ["reward/manager=naive", "reward.workers=4"],
        ["reward/manager=naive and reward.workers=4", "workers=null, or reward/manager=parallel"],
        ["reward/manager=parallel", "reward.workers=4"],
    ),
    (
        ["reward/manager=parallel", "reward.workers=0"],
        ["reward/manager=parallel and reward.workers=0", "null or at least 1"],
        ["reward/manager=parallel"],
    ),
    (
        ["reward/manager=remote", "reward.manager.url=http://h:1", "reward.workers=2"],
        ["reward/manager=remote and reward.workers=2", "set reward.workers=null"],
        ["reward/manager=remote", "reward.manager.url=http://h:1"],
    ),
    (
        ["reward/manager=batch"],
        ["reward/manager=batch and reward.function.path=null", "reward.function.path, or"],
        ["reward/manager=batch", "reward.function.path=r.py"],
    ),
    (
        ["reward/manager=custom", "reward.manager.path=a:B", "reward.function.path=r.py"],
        ["reward/manager=custom and reward.function.path=r.py", "set reward.function.path=null"],
        ["reward/manager=custom", "reward.manager.path=a:B"],
    ),
    (
        ["reward/manager=dapo", "reward.overlong.enabled=false"],
        ["reward/manager=dapo", "reward.overlong.enabled=false", "or reward/manager=auto"],
        ["reward/manager=dapo"],
    ),
    (
        ["reward.parts.model.scorer=gsm8k", *JUDGED],
        ["reward.model.part=model and reward.parts.model", "rename one"],
        ["reward.parts.model.scorer=gsm8k", "reward.model.part=taste", *JUDGED],
    ),
    (
        ["reward.cosine.enabled=true", "reward.cosine.limit_tokens=129"],
        ["reward.cosine.limit_tokens=129", "rollout.max_response_tokens=128", "at most 128"],
        ["reward.cosine.enabled=true", "reward.cosine.limit_tokens=128"],
    ),
    (
        [*ASKED, "reward.judge.template='{{ answer }}'"],
        ["reward.judge.template", "reward/judge/parse=built_in", "to number or labels"],
        [*ASKED, "reward.judge.template='{{ answer }}'", "reward/judge/parse=number"],
    ),
    (
        [*ASKED, "reward/judge/parse=number", "reward.judge.parse.highest=1"],
        ["reward.judge.parse.lowest=1", "reward.judge.parse.highest=1", "exchange them"],
        [*ASKED, "reward/judge/parse=number", "reward.judge.parse.highest=5"],
    ),
    (
        [*ASKED, "reward.judge.as_accuracy=true", "reward.judge.threshold=0"],
        ["reward.judge.threshold=0 makes every answer right", "go from 0 to 1"],
        [*ASKED, "reward.judge.as_accuracy=true", "reward.judge.threshold=1"],
    ),
    (
        [*ASKED, *JUDGED, "reward.judge.part=model"],
        ["reward.judge.part=model and reward.model.part=model", "rename one"],
        [*ASKED, *JUDGED],
    ),
    (
        [*ASKED, "reward.parts.judge.scorer=gsm8k"],
        ["reward.judge.part=judge and reward.parts.judge", "rename one"],
        [*ASKED, "reward.parts.form.scorer=gsm8k"],
    ),
    (
        [*ASKED, "reward.processes=3", "reward.judge.requests_per_minute=2"],
        ["reward.processes=3 share reward.judge.requests_per_minute=2", "to 2 or less"],
        [*ASKED, "reward.processes=3", "reward.judge.requests_per_minute=3"],
    ),
    (
        [*ALONE, *SERVED],
        ["model.adapter.publish=adapter and rollout/engine=http", "publish=merged"],
        [*ALONE, "rollout.engine.processes=1"],
    ),
    (
        [*ALONE, "rollout/engine=vllm", "model.adapter.rank=513"],
        ["model.adapter.rank=513 is more than the 512 that vLLM takes", "publish=merged"],
        [*ALONE, "rollout/engine=vllm", "model.adapter.rank=512"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts", "mended"), CASES)
def test_a_contradiction_names_both_fields_and_the_way_out(
    overrides: list[str], parts: list[str], mended: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    said = str(caught.value)
    assert "\n" not in said
    assert [part for part in parts if part not in said] == []
    assert load_recipe("quickstart", mended)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.warmup_steps=80"], []),
        (["trainer.steps=2"], ["optim.warmup_steps=5 is more than trainer.steps=2: the learning"]),
        (["warm_start.steps=9"], ["warm_start.warmup_steps=50 is more than warm_start.steps=9"]),
        (["critic.warmup_steps=80", "critic.optim.warmup_steps=81"], []),
        (
            ["algorithm/advantage=gae", "critic.warmup_steps=80", "critic.optim.warmup_steps=81"],
            [
                "critic.warmup_steps=80 leaves none of trainer.steps=80 for the policy: the critic "
                "learns alone for 79",
                "critic.optim.warmup_steps=81 is more than trainer.steps=80",
            ],
        ),
    ],
)
def test_a_warm_up_longer_than_the_run_is_cut_and_told(
    overrides: list[str], said: list[str]
) -> None:
    found = notices(load_recipe("quickstart", overrides))
    assert len(found) == len(said)
    assert [s for line, s in zip(found, said, strict=True) if f"Warning: {s}" not in line] == []


@pytest.mark.parametrize(("staleness", "count"), [(1, 1), (2, 0)])
def test_engines_that_will_want_for_groups_are_told_of(staleness: int, count: int) -> None:
    mode = ["trainer/mode=one_step_off", f"sampling.max_staleness={staleness}"]
    found = notices(load_recipe("quickstart", mode))
    assert sum("sampling.max_staleness=1" in line for line in found) == count


def test_what_ranks_and_micro_batches_cannot_share_out_is_told() -> None:
    small = "sampling.groups_per_step=4", "rollout.n=2", "trainer.mini_batch_groups=2"
    ranks = "trainer/strategy=fsdp2", "trainer.strategy.ranks=6"
    (idle,) = notices(load_recipe("quickstart", [*small, *ranks]))
    assert "an update has 4 answers for 6 ranks that learn side by side: 2 have nothing" in idle
    shared = [*small, *ranks, "trainer.strategy.sequence=2"]  # three by three
    assert notices(load_recipe("quickstart", shared)) == []
    cut = [*small, *SIX, "trainer.strategy.pipeline=2"]  # as much
    assert notices(load_recipe("quickstart", cut)) == []
    limits = "data.max_prompt_tokens=100", "rollout.max_response_tokens=128"
    fits = load_recipe("quickstart", [*limits, "trainer.microbatch_tokens=228"])
    assert notices(fits) == []
    (long,) = notices(load_recipe("quickstart", [*limits, "trainer.microbatch_tokens=227"]))
    assert "trainer.microbatch_tokens=227 holds no answer of 228 tokens with its prompt" in long


def test_each_broken_rule_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", ["rollout.n=1", "trainer.mini_batch_groups=15"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.commit=completion_order", "sampling.max_staleness=1"],
        ["sampling.commit=completion_order", "sampling.max_staleness=0"],
        ["reward.overlong.enabled=false", "reward.overlong.buffer_tokens=4096"],
        ["rollout.n=1", "sampling/filter=band"],
        ["rollout.n=1", "sampling.filter={name: band, metric: reward, low: 0.2, high: 0.8}"],
        ["evaluation.top_p=0.7", "evaluation.temperature=0"],
        ["evaluation.every=1", "evaluation.before=true", *FILES, "data.train_files=[a.parquet]"],
        ["sampling.filter.metric=whatever_the_scorer_gives"],
        [
            "warm_start.demonstrations.guess_share=0.1",
            "warm_start.demonstrations.working_share=0.9",
        ],
    ],
)
def test_what_only_looks_like_a_contradiction_passes(overrides: list[str]) -> None:
    assert load_recipe("quickstart", overrides)
