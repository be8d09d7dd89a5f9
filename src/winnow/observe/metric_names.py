"""Every figure of a run: name, unit, meaning, and the name that verl's users know it by.

`winnow metrics` prints this list, and docs/metrics.md is made of it. In a name `{a,b}` stands for
either, and a word in capitals for what it says: SOURCE a data source (which may hold slashes), NAME
a name, N and K numbers, SPREAD one of mean, max and min.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A row of the list; one name may stand for several figures."""

    name: str
    unit: str
    """Empty for numbers without one."""
    meaning: str
    verl: str = ""
    """Its nearest relative in verl; empty where there is none."""


_ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Scores of the answers trained on": (
        (
            "score/reward/SPREAD",
            "",
            "reward, all parts by their weights, overlong penalty included; before a KL",
            "critic/score/SPREAD; critic/rewards/SPREAD where no KL is in the reward",
        ),
        ("score/task_reward/SPREAD", "", "the task's own part, without penalties"),
        ("score/accuracy/SPREAD", "share", "accuracy, 0 to 1"),
        ("score/advantage/SPREAD", "", "advantage", "critic/advantages/SPREAD"),
        ("score/parts/NAME/SPREAD", "", "each part of the reward, before weights"),
        ("score/overlong", "share", "answers penalised for their length (manager dapo)"),
        ("score/overlong_reward/SPREAD", "", "the penalty (manager dapo)"),
        ("reward/kl", "nats a token", "KL in the reward", "actor/reward_kl_penalty"),
        ("reward/kl_coef", "", "its weight", "actor/reward_kl_penalty_coeff"),
    ),
    "By data source: all groups that the filter looked at": (
        ("source/SOURCE/{reward,accuracy}/mean", "", "mean over the answers"),
        ("source/SOURCE/{reward,accuracy}/best@N", "", "best answer of each group, mean"),
        ("source/SOURCE/{reward,accuracy}/worst@N", "", "worst answer of each group, mean"),
        ("source/SOURCE/accuracy/maj@N", "share", "most frequent answer of each group right"),
        (
            "source/SOURCE/own/NAME/{mean,best@N,worst@N}",
            "",
            "a number that the scorer said beside the score",
        ),
    ),
    "Sampling": (
        (
            "sampling/accuracy",
            "share",
            "all answers of the groups looked at, unfiltered; absent in a step that groups carried "
            "over fill, as is sampling/keep_rate",
        ),
        ("sampling/keep_rate", "share", "groups looked at that passed the filter"),
        (
            "sampling/groups/{trained,all_right,all_wrong,surplus,stale,failed}",
            "groups",
            "groups whose life ended, by what became of them",
        ),
        ("sampling/groups/admitted", "groups", "begun"),
        ("sampling/groups/looked_at", "groups", "with a verdict"),
        ("sampling/groups/carried_qualified", "groups", "qualified, for the next step"),
        ("sampling/groups/carried_open", "groups", "still being written"),
        ("sampling/qualify_rate", "share", "estimate of the share that qualifies"),
        ("sampling/empty_bounds", "", "bounds met in a row with no group to train on"),
        ("sampling/answers/truncated", "answers", "ended by the limit"),
        ("sampling/answers/resumed", "answers", "prefixes that went on"),
        ("sampling/answers/aborted", "answers", "came back as prefixes"),
        ("sampling/answers/retried", "answers", "begun again after a failure or a stall"),
        ("sampling/tokens/generated", "tokens", "written in the step"),
        (
            "sampling/tokens/{trained,all_right,all_wrong,surplus,stale,failed}",
            "tokens",
            "the token account: of groups whose life ended",
        ),
        ("sampling/tokens/in_progress", "tokens", "of groups that are not closed"),
        ("sampling/tokens/truncated", "tokens", "of answers that the limit ended"),
        ("sampling/tokens/baseline", "tokens", "of greedy baselines (remax)"),
        (
            "sampling/staleness/{mean,max}",
            "versions",
            "from the oldest token to the weights that learn it",
        ),
        ("data/epoch", "passes", "over the training data so far", "training/epoch"),
    ),
    "Lengths of the answers trained on": (
        ("length/response/SPREAD", "tokens", "of an answer", "response_length/SPREAD"),
        (
            "length/prompt/SPREAD",
            "tokens",
            "of a prompt; a run says at its start how many data.max_prompt_tokens cut or left out",
            "prompt_length/SPREAD, prompt_length/clip_ratio",
        ),
        ("length/truncated", "share", "answers that the limit ended", "response_length/clip_ratio"),
    ),
    "Policy, means over the updates of a step": (
        ("actor/loss", "", "the whole loss"),
        ("actor/policy_loss", "", "its policy part", "actor/pg_loss"),
        ("actor/kl_loss", "nats", "KL to the reference in the loss", "actor/kl_loss"),
        ("actor/entropy", "nats", "of the next token", "actor/entropy"),
        ("actor/approx_kl", "nats", "old minus new log-prob", "actor/ppo_kl"),
        ("actor/mean_prob", "", "mean probability of the tokens trained on"),
        ("actor/clip", "share", "tokens where the bound binds", "actor/pg_clipfrac"),
        ("actor/clip_{low,high}", "share", "tokens where the lower, the upper bound binds"),
        ("actor/dual_clip", "share", "tokens at the dual bound", "actor/pg_clipfrac_lower"),
        ("actor/selected_share", "share", "tokens that clip_cov or kl_cov chose"),
        ("actor/old_pass", "0 or 1", "1 where old log-probs took a pass of their own"),
        ("actor/grad_norm", "", "norm before clipping", "actor/grad_norm"),
        ("actor/lr", "", "learning rate", "actor/lr"),
        ("actor/{updates,skipped_updates}", "updates", "made; left out as not finite"),
    ),
    "Experts of a mixture, over the tokens of a step's updates": (
        (
            "experts/max_load",
            "",
            "tokens of the busiest expert over the mean of its layer; the worst layer's",
        ),
        ("experts/unused", "share", "experts that no token went to, of all layers"),
        (
            "experts/rerouted",
            "share",
            "choices of the engine's that the trainer's router would not have made "
            "(rollout.routing_replay)",
        ),
    ),
    "Critic": (
        ("critic/value/SPREAD", "", "values before the step", "critic/values/SPREAD"),
        ("critic/return/SPREAD", "", "returns", "critic/returns/SPREAD"),
        ("critic/explained_variance", "share", "by the values before", "critic/vf_explained_var"),
        ("critic/value_loss", "", "mean over the updates", "critic/vf_loss"),
        ("critic/clip_share", "share", "tokens with a clipped value", "critic/vf_clipfrac"),
        ("critic/grad_norm", "", "norm before clipping", "critic/grad_norm"),
        ("critic/lr", "", "learning rate", "critic/lr"),
        ("critic/{updates,skipped_updates}", "updates", "made; left out as not finite"),
    ),
    "Sampler against trainer": (
        (
            "mismatch/abs_delta",
            "nats",
            "mean distance of log-probs",
            "training/rollout_probs_diff_mean (of probabilities)",
        ),
        (
            "mismatch/max_delta",
            "nats",
            "largest",
            "training/rollout_probs_diff_max (of probabilities)",
        ),
        (
            "mismatch/pearson",
            "",
            "correlation of the probabilities",
            "training/rollout_actor_probs_pearson_corr",
        ),
        ("mismatch/k1", "nats", "KL estimate, sampler to trainer", "rollout_corr/kl"),
        ("mismatch/k3", "nats", "the same, never negative", "rollout_corr/k3_kl"),
        ("mismatch/chi2", "", "chi-squared divergence", "rollout_corr/chi2_token"),
        (
            "mismatch/ess",
            "share",
            "effective sample size of the weights",
            "rollout_corr/rollout_is_eff_sample_size",
        ),
        ("mismatch/outside", "share", "ratios below 0.5 or above 2"),
        ("mismatch/ppl_old", "", "perplexity by the trainer", "rollout_corr/training_ppl"),
        ("mismatch/ppl_behav", "", "perplexity by the sampler", "rollout_corr/rollout_ppl"),
        ("mismatch/ppl_ratio", "", "trainer's over sampler's", "rollout_corr/ppl_ratio"),
        ("mismatch/age_K/share", "share", "tokens K weight versions old; 8: and older"),
        ("mismatch/age_K/{abs_delta,k3}", "nats", "of these tokens"),
        (
            "correction/rejected_{tokens,samples}",
            "share",
            "left out by the correction",
            "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
        ),
        ("correction/weight", "", "mean weight", "rollout_corr/rollout_is_mean"),
        ("correction/weight_bound", "share", "tokens whose weight was cut or set to 0"),
        ("publish/max_delta", "nats", "log-probs of fixed tokens, engine against trainer"),
    ),
    "Held-out answers": (
        ("eval/SOURCE/avg@N", "share", "mean accuracy", "val-core/SOURCE/acc/mean@N"),
        ("eval/SOURCE/avg@N_se", "share", "its standard error over prompts"),
        ("eval/SOURCE/std@N", "share", "deviation within a prompt", "val-aux/SOURCE/acc/std@N"),
        ("eval/SOURCE/pass@K", "share", "a right one among K, unbiased"),
        ("eval/SOURCE/best@N", "share", "best of each prompt", "val-core/SOURCE/acc/best@N/mean"),
        ("eval/SOURCE/worst@N", "share", "worst of each prompt", "val-aux/SOURCE/acc/worst@N/mean"),
        ("eval/SOURCE/maj@K", "share", "vote of K right", "val-core/SOURCE/acc/maj@N/mean"),
        ("eval/SOURCE/{greedy,greedy_se}", "share", "greedy answers right; its error"),
        ("eval/SOURCE/prompts", "prompts", "problems asked"),
        ("eval/SOURCE/length", "tokens", "of a sampled answer"),
        ("eval/SOURCE/truncated", "share", "sampled answers that the limit ended"),
        ("eval/SOURCE/unread", "share", "those in which the scorer found nothing to compare"),
        ("eval/SOURCE/part_NAME", "", "a part of the score that a model gave"),
        (
            "eval/SOURCE/own_NAME_{mean,best@N,worst@N}",
            "",
            "a number that the scorer said beside the score",
            "val-aux/SOURCE/NAME/{mean@N,best@N/mean,worst@N/mean}",
        ),
    ),
    "Scoring": (
        ("scoring/{answers,failed}", "answers", "of training, scored; those that failed"),
        ("scoring/busy_s", "s", "at least one training answer was scored", "timing_s/reward"),
        ("scoring/{mean,max}_s", "s", "an answer's score took, waiting included"),
        ("judge/requests", "", "to a judge, since the line before"),
        ("judge/{retries,cache_hits,unparsed}", "", "tries again; from the cache; unreadable"),
        ("judge/tokens", "tokens", "sent and written, cached replies not counted"),
    ),
    "Imitation of demonstrations (winnow sft)": (
        (
            "sft/loss",
            "nats",
            "mean over the imitated tokens; of a warm start on the terminal alone",
        ),
        ("sft/held_out_loss", "nats", "mean over the answers' tokens of sft.eval_files"),
        ("sft/tokens", "tokens", "imitated"),
        ("sft/grad_norm", "", "norm before clipping"),
        ("sft/lr", "", "learning rate"),
        ("sft/{updates,skipped_updates}", "updates", "made; left out as not finite"),
    ),
    "Time, work and memory": (
        ("start/time_s", "s", "start of the process, in its first line"),
        ("sft/time_s", "s", "making the warm start, in the first line"),
        ("time/rollout_s", "s", "answers are written and scored", "timing_s/gen"),
        ("time/old_logprobs_s", "s", "pass for the old log-probs", "timing_s/old_log_prob"),
        ("time/reference_s", "s", "pass of the reference", "timing_s/ref"),
        ("time/values_s", "s", "pass of the critic", "timing_s/values"),
        ("time/update_s", "s", "updates", "timing_s/update_actor, timing_s/update_critic"),
        ("time/batch_s", "s", "packing, advantages", "timing_s/adv"),
        ("time/{publish,write}_s", "s", "weights to engines; rollouts to disk"),
        ("time/evaluate_s", "s", "held-out answers", "timing_s/testing"),
        ("time/checkpoint_s", "s", "saving", "timing_s/save_checkpoint"),
        ("time/ranks_s", "s", "sending a step to the ranks, waiting for them"),
        ("time/{learn,wait}_s", "s", "beside sampling: the rest of learning; for groups"),
        ("time/other_s", "s", "the rest"),
        ("time/step_s", "s", "the step, which the others add up to", "timing_s/step"),
        (
            "time/{rollout,old_logprobs,reference,values,update}_us_per_token",
            "µs",
            "a token",
            "timing_per_token_ms/…",
        ),
        ("overlap/sampling_s", "s", "engines wrote while a step was learnt"),
        ("overlap/engines_wait_s", "s", "they waited for groups to be learnt or published"),
        ("throughput/tokens_per_s", "tokens/s", "written, evaluation left out"),
        ("throughput/tokens_per_s_per_device", "tokens/s", "the same a device", "perf/throughput"),
        ("throughput/tflops", "TFLOP/s", "of the models' passes, attention counted"),
        ("throughput/mfu", "share", "of all devices' peak (observe.peak_tflops)", "perf/mfu/actor"),
        (
            "memory/peak_gib",
            "GiB",
            "of the GPU, else of the process",
            "perf/max_memory_allocated_gb",
        ),
        ("ranks/lockstep", "share", "of the ranks' time in which none waits for another's part"),
        ("ranks/spread", "", "heaviest rank's work over the mean"),
        ("ranks/idle", "share", "empty micro-batches"),
        ("ranks/peak_gib", "GiB", "memory of the largest rank"),
    ),
}
SECTIONS = {title: tuple(Metric(*row) for row in rows) for title, rows in _ROWS.items()}
_HEAD = """# Metrics

Made by `winnow metrics --markdown > docs/metrics.md`; `winnow metrics actor` lists a part of it on
the terminal.

A line of `metrics.jsonl` is `{"step": 7, NAME: NUMBER, …}`; step 0 is the evaluation before
training. [Trackers](trackers.md) get the same names (MLflow has `_at_` for `@`). What a run does
not have is absent: no critic, no `critic/…`. In a name `{a,b}` stands for either, `SOURCE` for a
data source, `NAME` for a name, `N` and `K` for numbers, `SPREAD` for `mean`, `max` and `min`.
Shares are of 1, log-probs in nats. A loss of your own adds `actor/NAME`, the mean over tokens of
its sum NAME. FLOP are counted by all parameters, frozen ones too, but of a mixture by those of the
experts that a token goes to. The last column has the nearest figure of verl, where there is one."""
_WORDS = {"SOURCE": r".+", "NAME": r"[^/]+", "SPREAD": "(?:mean|max|min)", "N": r"\d+", "K": r"\d+"}


def metric_of(name: str) -> Metric | None:
    """Return the row that a figure belongs to; None where the list has none."""
    return next((row for row, pattern in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    return tuple((row, re.compile(_pattern(row.name))) for row in every_metric())


def _pattern(name: str) -> str:
    parts = re.split(r"(\{[^}]*\}|[A-Z]+)", name)
    return "".join(
        f"(?:{'|'.join(map(_pattern, part[1:-1].split(',')))})"
        if part.startswith("{")
        else _WORDS.get(part, re.escape(part))
        for part in parts
    )


def every_metric() -> Iterator[Metric]:
    """Yield all rows."""
    for rows in SECTIONS.values():
        yield from rows


def as_markdown() -> str:
    """Write the page docs/metrics.md."""
    lines = [_HEAD]
    for title, rows in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning | in verl |", "|---|---|---|---|"]
        for row in rows:
            verl = f"`{row.verl}`" if row.verl else ""
            lines.append(f"| `{row.name}` | {row.unit} | {row.meaning} | {verl} |")
    return "\n".join(lines) + "\n"
