"""What a user reads when a recipe or an override is wrong: field, value, remedy, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.config.load import load_recipe
from winnow.errors import ConfigError

SHELL = "(set by the command line)"
LOSSES = (
    "ppo_clip, gspo, cispo, sapo, gmpo, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, gpg, reinforce, "
    "custom"
)
OVERRIDES = [
    # Values
    (["optim.lr=-1"], f"optim.lr must be a number greater than 0, got -1 {SHELL}"),
    (["optim.lr=fast"], f"optim.lr must be a number greater than 0, got 'fast' {SHELL}"),
    (["optim.lr=inf"], f"optim.lr must be a number greater than 0, got Infinity {SHELL}"),
    (["optim.lr="], f"optim.lr must be a number greater than 0, got '' {SHELL}"),
    (["rollout.top_p=1.7"], f"rollout.top_p must be a number in (0, 1], got 1.7 {SHELL}"),
    (["rollout.n=1.5"], f"rollout.n must be a whole number of at least 1, got 1.5 {SHELL}"),
    (["rollout.n=true"], f"rollout.n must be a whole number of at least 1, got true {SHELL}"),
    (
        ["optim.lr=${run.deterministic}"],
        f"optim.lr must be a number greater than 0, got true {SHELL}",
    ),
    (["rollout.n=[1]"], f"rollout.n must be a whole number of at least 1, got [1] {SHELL}"),
    (["rollout.n=null"], f"rollout.n must be a whole number of at least 1, got null {SHELL}"),
    (["data.shuffle=perhaps"], f"data.shuffle must be true or false, got 'perhaps' {SHELL}"),
    (
        ["optim.schedule=quadratic"],
        f"optim.schedule must be one of constant, linear, cosine, got 'quadratic' {SHELL}",
    ),
    (
        ["optim.grad_clip=none"],
        "optim.grad_clip must be a number greater than 0 or null, got 'none' "
        f"{SHELL}; write null for none",
    ),
    (
        ["optim.betas=[0.9]"],
        f"optim.betas must be a list of 2 numbers in [0, 1), got [0.9] {SHELL}",
    ),
    (
        ["optim.betas=[0.9,1]"],
        f"optim.betas must be a list of 2 numbers in [0, 1), got [0.9, 1] {SHELL}",
    ),
    (
        ["data.train_files=a.parquet"],
        f"data.train_files must be a list of text, got 'a.parquet' {SHELL}; "
        "write data.train_files=[a.parquet]",
    ),
    (
        ["reward.scorers={a:1}"],
        f"reward.scorers.a must be text, got 1 {SHELL}; put it in quotes",
    ),
    (["reward.scorers=3"], f"reward.scorers must be a table of text, got '3' {SHELL}"),
    (
        ["run.name=a/b"],
        f"run.name must name one folder (not empty, no slash, no dot in front), got 'a/b' {SHELL}",
    ),
    (
        ["data.prompt_template={*:Q}"],
        "data.prompt_template must say {prompt} where the message goes, for '*' too, "
        f'got {{"*": "Q"}} {SHELL}',
    ),
    (
        ["trainer.expires_at=tomorrow"],
        "trainer.expires_at must be a time such as 2026-11-23T07:05:00+00:00, or in seconds, or "
        f"never, got 'tomorrow' {SHELL}",
    ),
    (["optim.lr=???"], "optim.lr has no default; add optim.lr=VALUE"),
    (
        ["optim.lr=${nowhere}"],
        "optim.lr: interpolation key 'nowhere' not found; mend the value or its ${…}",
    ),
    (
        ["optim.lr=${oc.env:WINNOW_NOPE}"],
        "optim.lr: environment variable 'WINNOW_NOPE' not found; mend the value or its ${…}",
    ),
    (
        ["optim.lr=${optim.eps}", "optim.eps=${optim.lr}"],
        "optim.lr: recursive interpolation detected; mend the value or its ${…}",
    ),
    (
        ["run.name='${x'"],
        "run.name: no viable alternative at input '${x'; mend the value or its ${…}",
    ),
    # Keys
    (
        ["optim.rl=1"],
        f"optim.rl is no known key {SHELL}; did you mean optim.lr or reward.cosine.right_long?",
    ),
    (["optim.lrr=1"], f"optim.lrr is no known key {SHELL}; did you mean optim.lr?"),
    (
        ["lr=1"],
        f"lr is no known key {SHELL}; did you mean critic.optim.lr or optim.lr or warm_start.lr?",
    ),
    (
        ["+optim.learning_rate=1"],
        f"optim.learning_rate is no known key {SHELL}; did you mean optim.lr or critic.optim.lr "
        "or warm_start.lr?",
    ),
    (
        ["optim.wd=1"],
        f"optim.wd is no known key {SHELL}; did you mean optim.weight_decay or "
        "cluster.runtime_env.working_dir or critic.optim.weight_decay?",
    ),
    (
        ["algorithm/polcy_loss=x"],
        f"algorithm.polcy_loss is no known key {SHELL}; did you mean algorithm/policy_loss "
        "or algorithm.policy_loss.beta or algorithm.policy_loss.coef?",
    ),
    (
        ["xyzzy=1"],
        f"xyzzy is no known key {SHELL}; the sections are run, model, warm_start, sft, data, "
        "reward, rollout, sampling, algorithm, reference, critic, optim, trainer, cluster, "
        "evaluation, observe; see --help-config",
    ),
    (
        ["cluster=ray", "cluster.init.cpus=2"],
        f"cluster.init.cpus is no key of cluster=ray {SHELL}; its keys are init.num_cpus, "
        "init.object_store_mb, init.temp_dir",
    ),
    (["optim.betas.0=1"], f"optim.betas.0 is no known key {SHELL}; did you mean optim.betas?"),
    (
        ["hydra.run.dir=x"],
        f"hydra.run.dir is no known key {SHELL}; did you mean observe.tensorboard.dir or run.dir?",
    ),
    (
        ["evaluation=3"],
        "evaluation must be keys (before, every, n, temperature, top_p, top_k, greedy, "
        f"max_prompts, max_response_tokens, data_set), got 3 {SHELL}",
    ),
    (["~optim.lr"], "~optim.lr removes no entry of a table; leave it out, or set a value"),
    (
        ["~reward.scorers.x"],
        "~reward.scorers.x removes no entry of a table; leave it out, or set a value",
    ),
    # Variants
    (
        ["algorithm/policy_loss=ppo"],
        f"algorithm.policy_loss must be one of {LOSSES}, got 'ppo' {SHELL}",
    ),
    (
        ["algorithm.policy_loss.name=ppo"],
        f"algorithm.policy_loss must be one of {LOSSES}, got 'ppo' {SHELL}",
    ),
    (
        ["algorithm.policy_loss=null"],
        f"algorithm.policy_loss must be one of {LOSSES}, got null {SHELL}",
    ),
    (
        ["rollout.engine=tgi"],
        f"rollout.engine must be one of torch, vllm, http, custom, got 'tgi' {SHELL}",
    ),
    (
        ["algorithm/policy_loss=reinforce", "algorithm.policy_loss.dual_clip=4"],
        f"algorithm.policy_loss.dual_clip is no key of algorithm/policy_loss=reinforce {SHELL}; "
        "choose algorithm/policy_loss=ppo_clip, or leave the key out",
    ),
    (
        ["algorithm.policy_loss.clip_low=0.1", "algorithm.policy_loss.name=reinforce"],
        f"algorithm.policy_loss.clip_low is no key of algorithm/policy_loss=reinforce {SHELL}; "
        "choose algorithm/policy_loss=clip_cov or algorithm/policy_loss=gmpo or "
        "algorithm/policy_loss=gspo or algorithm/policy_loss=ppo_clip, or leave the key out",
    ),
    (
        ["sampling/filter=band", "sampling.filter.lo=0.1"],
        f"sampling.filter.lo is no key of sampling/filter=band {SHELL}; "
        "its keys are high, low, metric",
    ),
    (
        ["sampling.filter={name:band,low:0.1}", "sampling/filter=none"],
        f"sampling.filter.low is no key of sampling/filter=none {SHELL}; "
        "choose sampling/filter=band, or leave the key out",
    ),
    # Grammar
    (
        ["optim.lr"],
        "override 'optim.lr' is not in Hydra's grammar (missing EQUAL at '<EOF>'); write "
        "KEY=VALUE, with special characters in quotes: KEY='\"a: b\"'",
    ),
    (
        ["optim.betas=[1"],
        "override 'optim.betas=[1' is not in Hydra's grammar (no viable alternative at input "
        "'[1'); write KEY=VALUE, with special characters in quotes: KEY='\"a: b\"'",
    ),
    (
        ["optim.lr=1,2"],
        "override 'optim.lr=1,2' is a sweep over several values; give one value, a list in "
        "brackets (optim.lr=[a,b]), or --multirun",
    ),
    (
        ["warm_start@x=sft"],
        "override 'warm_start@x=sft' must be KEY=VALUE without a package (@), or ~KEY without a "
        "value; leave out the rest",
    ),
    (
        ["~reward.scorers.a=x"],
        "override '~reward.scorers.a=x' must be KEY=VALUE without a package (@), or ~KEY without a "
        "value; leave out the rest",
    ),
    (
        ["run.dir=\udcff"],
        "override 'run.dir=\\udcff' is not valid UTF-8; type it anew",
    ),
]
FILES = [
    (
        "optim:\n  lr: -1\n",
        "optim.lr must be a number greater than 0, got -1 (set by {file}, line 2)",
    ),
    (
        "optim:\n  lr: 1\n  lrr: 2\n",
        "optim.lrr is no known key (set by {file}, line 3); did you mean optim.lr?",
    ),
    (
        "optim.lr: 1\n",
        "optim.lr is no known key (set by {file}, line 1); "
        "a file nests keys instead of dotting them: optim: {{lr: …}}",
    ),
    (
        "run:\n  name: 2024\n",
        "run.name must be text or null, got 2024 (set by {file}, line 2); put it in quotes",
    ),
    (
        "optim:\n",
        "optim must be keys (lr, warmup_steps, schedule, final_lr_ratio, weight_decay, betas, "
        "eps, grad_clip, max_skipped_updates), got null (set by {file}, line 1)",
    ),
    (
        "sampling:\n  filter: {{low: 1}}\n",
        "sampling.filter.low is no key of sampling/filter=variance (set by {file}, line 2); "
        "choose sampling/filter=band, or leave the key out",
    ),
    (
        "warm_start: tuned\n",
        "warm_start must be one of none, sft, got 'tuned' (set by {file}, line 1)",
    ),
    ("optim:\n  lr: 1\n bad: 2\n", "recipe {file}, line 3: {yaml}; mend the YAML there"),
    ("run: [1\n", "recipe {file}, line 2: {yaml}; mend the YAML there"),
    ("run: {{}}\nrun: {{}}\n", "recipe {file}, line 2: the key 'run' appears twice; {mend}"),
    ("run: !!set {{}}\n", "recipe {file}, line 1: {yaml}; mend the YAML there"),
    ("run: &a\n  x: *a\n", "recipe {file}, line 1: an anchor contains itself; {mend}"),
    (
        "run: {{name: \x07}}\n",
        "recipe {file} is not text in UTF-8 (position 12: special characters are not allowed); "
        "save it as UTF-8, without control characters",
    ),
    ("- optim\n", "recipe {file} must hold sections (`optim:` …), got a list"),
    (
        "defaults: base\n",
        "`defaults` must be a list of recipes, with _self_ at most once, got 'base' "
        "({file}, line 1)",
    ),
    (
        "defaults: [nowhere]\n",
        "there is no recipe 'nowhere' to include ({file}, line 1); Give the path of a YAML file, "
        "or a name that `winnow recipes` lists",
    ),
    (
        "defaults: [mine]\n",
        "recipe {file} includes itself (mine.yaml -> mine.yaml); remove it from `defaults`",
    ),
    (
        "defaults: [_self_, _self_]\n",
        "`defaults` must be a list of recipes, with _self_ at most once, got "
        '["_self_", "_self_"] ({file}, line 1)',
    ),
    (
        "defaults: [{{a: 1}}]\n",
        "an entry of `defaults` must be a recipe or GROUP: VARIANT, got {{'a': 1}} "
        "({file}, line 1)",
    ),
]


def message(recipe: str, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "expected"), OVERRIDES)
def test_a_wrong_override_is_answered_in_one_line(overrides: list[str], expected: str) -> None:
    assert message("quickstart", overrides) == expected


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_a_wrong_file_is_answered_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text.format(), encoding="utf-8")
    said = message(str(path), [])
    assert "\n" not in said
    wanted = expected.format(file=path, yaml="{yaml}", mend="mend the YAML there")
    before, _, after = wanted.partition("{yaml}")
    assert said.startswith(before)
    assert said.endswith(after)
    assert ("{yaml}" in wanted and len(said) > len(before + after) + 10) or said == wanted


def test_each_of_several_faults_has_its_line() -> None:
    keys = message("quickstart", ["optim.lrr=1", "optim.lr=-1", "warm_start=x"])
    assert [line.split()[0] for line in keys.splitlines()] == ["optim.lrr", "warm_start"]
    values = message("quickstart", ["optim.lr=-1", "trainer.steps=0", "rollout.n=true"])
    assert sorted(line.split()[0] for line in values.splitlines()) == [
        "optim.lr",
        "rollout.n",
        "trainer.steps",
    ]


def test_the_circle_of_an_include_is_shown(tmp_path: Path) -> None:
    for name, included in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: [{included}]", encoding="utf-8")
    said = message(str(tmp_path / "a.yaml"), [])
    assert said.endswith("includes itself (b.yaml -> c.yaml -> b.yaml); remove it from `defaults`")


def test_a_fault_in_an_included_file_names_that_file(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("optim:\n  lr: -1\n", encoding="utf-8")
    mine.write_text("defaults: [base]\noptim: {eps: 1}\n", encoding="utf-8")
    assert message(str(mine), []).endswith(f"got -1 (set by {base}, line 2)")


@pytest.mark.parametrize(
    ("recipe", "start"),
    [
        ("quikstart", "there is no recipe 'quikstart'; did you mean quickstart? Give the path of"),
        ("no/such.yaml", "there is no recipe 'no/such.yaml'; Give the path of a YAML file, or"),
        ("", "there is no recipe ''; Give the path of a YAML file, or"),
    ],
)
def test_a_missing_recipe_is_answered_with_where_those_there_are_stand(
    recipe: str, start: str
) -> None:
    said = message(recipe, [])
    assert said.startswith(start)
    assert said.endswith("Give the path of a YAML file, or a name that `winnow recipes` lists")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert message(str(tmp_path), []).startswith(f"there is no recipe '{tmp_path}'; Give the path")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"run: {name: \xff}")
    wanted = (
        f"recipe {path} is not text in UTF-8 (position 12: invalid start byte); save it as UTF-8, "
        "without control characters"
    )
    assert message(str(path), []) == wanted


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("[" * 5000, encoding="utf-8")
    assert message(str(path), []) == f"recipe {path} is nested too deeply; flatten it"
