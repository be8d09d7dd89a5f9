"""The names of figures in a step's record, and so in metrics.jsonl.

A name is a path, `part/what/which`; the unit stands at the end (`_s`, `_per_s`, `_gib`), tokens
and shares of 1 have none. SPREAD stands for `/mean`, `/max` and `/min`. What a run does not have
is absent. A line of metrics.jsonl is `{"step": 7, NAME: NUMBER, …}`; step 0
is the evaluation before training.

| name | meaning |
|---|---|
| score/{reward,task_reward,accuracy,advantage} SPREAD | over the answers trained on |
| score/parts/NAME SPREAD | each part of the reward, before weights: task, overlong, … |
| score/overlong | share of the answers penalised for their length (reward/manager=dapo) |
| score/overlong_reward SPREAD | the penalty (reward/manager=dapo) |
| sampling/accuracy | over all answers of the groups closed in the step, before the filter |
| sampling/keep_rate | share of the closed groups that passed the filter |
| sampling/groups/{trained,all_right,all_wrong,surplus,stale,failed} | groups whose life ended |
| sampling/groups/{admitted,looked_at,carried_qualified,carried_open} | groups of the step |
| sampling/qualify_rate, sampling/empty_bounds | the estimate p̂; bounds met with nothing |
| sampling/answers/{truncated,resumed,aborted,retried} | answers of the step |
| sampling/tokens/{generated,trained,…,failed}, sampling/tokens/in_progress | the token account |
| sampling/tokens/{truncated,baseline} | flags beside the account; of greedy baselines: ReMax |
| sampling/staleness/{mean,max} | weight versions between sampling and training |
| length/response, length/prompt SPREAD | tokens, over the answers trained on |
| length/truncated | share of the answers that the limit ended |
| actor/{loss,policy_loss,kl_loss,entropy,approx_kl,mean_prob} | means over the updates |
| actor/{clip,clip_low,clip_high,dual_clip} | share of tokens where the bound binds |
| actor/selected_share | tokens that clip_cov or kl_cov chose |
| actor/old_pass | 1 where the old log-probs took a pass of their own, else 0 |
| {actor,critic}/{grad_norm,lr,updates,skipped_updates} | the optimizers |
| critic/{value,return} SPREAD | over the tokens learnt from, before the step |
| critic/{explained_variance,value_loss,clip_share} | of the values before the step; the updates |
| publish/max_delta | log-probs of fixed tokens, engine against trainer, nats |
| ranks/{spread,idle} | heaviest rank's work over the mean; share of empty micro-batches |
| ranks/peak_gib | memory of the largest rank: its GPU's, else the process's |
| reward/{kl,kl_coef} | KL in the reward, nats a token, and its weight |
| correction/{rejected_tokens,rejected_samples} | shares |
| correction/{weight,weight_bound} | mean weight; share of tokens cut or set to 0 |
| mismatch/{abs_delta,max_delta,pearson,k1,k3,chi2,ess,outside,…} | sampler against trainer |
| eval/SOURCE/{avg@N,pass@K,maj@K,std@N,greedy,prompts} | held-out prompts of a data source |
| eval/SOURCE/{avg@N_se,greedy_se} | their standard errors |
| eval/SOURCE/{length,truncated} | of the sampled held-out answers |
| eval/SOURCE/part_NAME | their mean score by a model that scores in evaluation, too |
| judge/{requests,retries,cache_hits,unparsed} | of a judge over HTTP, since the line before |
| judge/tokens | that it was sent and wrote, cached replies not counted |
| sft/loss | the warm-up |
| sft/time_s | seconds that the start took, in the first line |
| time/PHASE_s, time/step_s | seconds; the phases and `time/other_s` add up to the step |
| time/{rollout,old_logprobs,reference,values,update}_us_per_token | microseconds a token |
| throughput/{tokens_per_s,tokens_per_s_per_device,tflops,mfu} | |
| memory/peak_gib | |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Number = int | float
Record = Mapping[str, Number]

Outcome = Literal["trained", "all_right", "all_wrong", "surplus", "stale", "failed"]
"""Uses of a closed group; each token is booked under one of these."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# What the viewers (console, curve, summary) look for by name.
ACCURACY = "sampling/accuracy"
TRAINED_ACCURACY = "score/accuracy/mean"
REWARD = "score/reward/mean"
KEEP_RATE = "sampling/keep_rate"
LENGTH = "length/response/mean"
TRUNCATED = "length/truncated"
ENTROPY = "actor/entropy"
TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS = "sampling/tokens/"
GENERATED_TOKENS = TOKENS + "generated"
IN_PROGRESS_TOKENS = TOKENS + "in_progress"
STEP_S = "time/step_s"
SFT_LOSS = "sft/loss"
SFT_S = "sft/time_s"
EVAL = "eval/"


def by_source(record: Mapping[str, Number]) -> dict[str, dict[str, Number]]:
    """Pick the evaluation figures of a record: data source → figure → number.

    A source may hold slashes (`openai/gsm8k`), a figure holds none.
    """
    found: dict[str, dict[str, Number]] = {}
    for name, value in record.items():
        if name.startswith(EVAL):
            source, _, figure = name.removeprefix(EVAL).rpartition("/")
            found.setdefault(source, {})[figure] = value
    return found
