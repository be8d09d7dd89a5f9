"""What `winnow plan` says of a rank's memory, against real ranks over gloo; what 32B costs it.

    python -m benchmarks.plan [--only NAME …] [--out benchmarks/results/plan.md]
    python -m benchmarks.plan --published [--out FILE]    # against prime-rl's published rows

Each configuration is planned (fake tensors, one process), then run: 2 or 4 ranks over gloo on this
machine take the same update with the same two micro-batches, one thread each. Measured is the
largest resident memory (VmHWM) of any rank within the update, above what the process had before it
loaded a model. Weights are drawn, since pages that nobody has written to are not resident.

glibc keeps freed blocks of less than a threshold that grows as the program runs; the ranks run with
MALLOC_MMAP_THRESHOLD_=65536, so that what is freed is given back, as the plan supposes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**30
SMALL = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000}
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
WIDE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 64000}
BASE = (
    "model.dtype=float32",
    "data.max_prompt_tokens=64",
    "rollout.max_response_tokens=448",
    "reward.overlong.enabled=false",
    *("cluster=local", "rollout/engine=torch", "trainer/strategy=single"),
)
STRATEGY = "trainer.strategy."
CHECKPOINTED = "model.gradient_checkpointing=true"
CONFIGURATIONS: dict[str, tuple[dict[str, int], int, tuple[str, ...]]] = {
    "small": (SMALL, 2, ("trainer.microbatch_tokens=1024", "model.gradient_checkpointing=false")),
    "small, checkpointed": (SMALL, 2, ("trainer.microbatch_tokens=2048", CHECKPOINTED)),
    "small, 4 ranks, sequence 2": (
        SMALL,
        4,
        ("trainer.microbatch_tokens=2048", CHECKPOINTED, f"{STRATEGY}sequence=2"),
    ),
    "small, 4 ranks, 2 replicas": (
        SMALL,
        4,
        ("trainer.microbatch_tokens=1024", CHECKPOINTED, f"{STRATEGY}replicas=2"),
    ),
    "small, bfloat16": (
        SMALL,
        2,
        ("trainer.microbatch_tokens=1024", CHECKPOINTED, "model.dtype=bfloat16"),
    ),
    "small, LoRA": (
        SMALL,
        2,
        ("trainer.microbatch_tokens=1024", CHECKPOINTED, "model/adapter=lora"),
    ),
    "small, gathered weights kept": (
        SMALL,
        2,
        (
            "trainer.microbatch_tokens=1024",
            CHECKPOINTED,
            f"{STRATEGY}reshard_after_forward=false",
        ),
    ),
    "small, critic and reference": (
        SMALL,
        2,
        (
            "trainer.microbatch_tokens=1024",
            CHECKPOINTED,
            "algorithm/advantage=gae",
            "algorithm/kl/loss=fixed",
        ),
    ),
    "wide": (WIDE, 2, ("trainer.microbatch_tokens=1024", CHECKPOINTED)),
}


def recipe_of(name: str, folder: str) -> list[str]:
    """Return the overrides of a configuration."""
    _, ranks, own = CONFIGURATIONS[name]
    layout = ("trainer/strategy=fsdp2", f"{STRATEGY}ranks={ranks}", f"model.path={folder}")
    return [*BASE, *layout, *own]


def planned(name: str, folder: str) -> dict[str, float]:
    """Plan a configuration; returns GiB by phase."""
    from winnow.config.load import load_recipe
    from winnow.plan.rank import TrackedFSDP2, run_rank
    from winnow.plan.tracker import DeviceTracker, TrackedStorage

    class OnCpu(TrackedFSDP2):
        kernels = "cpu"

    class GlooTracker(DeviceTracker):  # type: ignore[no-untyped-call]
        """Gloo gathers and scatters by way of a copy of the whole."""

        def _count_collective(self, name: str, size: int) -> None:
            super()._count_collective(name, size)
            if name.startswith(("allgather", "reduce_scatter")):
                buffer = TrackedStorage("buffers of gloo", name, (size,))
                self._events += [(buffer, 0, size), (buffer, size, 0)]

    config = load_recipe("dapo_qwen2.5_32b", recipe_of(name, folder))
    tracker = run_rank(config, folder, OnCpu, GlooTracker).tracker
    return {n: tracker.peak(n).bytes / GIB for n in tracker.phases if n != "start"}


def resident(key: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def be_rank(name: str, folder: str, store: str, rank: int) -> None:
    """Take the update as one of the ranks, and print its figures."""
    import gc

    import torch
    import torch.distributed as dist

    from winnow.config.load import load_recipe
    from winnow.config.roles import Roles
    from winnow.config.trainer import Fsdp2
    from winnow.learning.fsdp2 import FSDP2Strategy, make_mesh
    from winnow.learning.strategy import local
    from winnow.plan.rank import full_batches, run_phases
    from winnow.ranks.learner import make_learner
    from winnow.ranks.models import load_policy_model

    class Drawn(FSDP2Strategy):
        def _place_weights(self) -> Any:
            held = super()._place_weights()
            for parameter in self.model.parameters():
                local(parameter.data).normal_(0.0, 0.02)
            return held

    torch.set_num_threads(1)
    config = load_recipe("dapo_qwen2.5_32b", recipe_of(name, folder))
    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    world = strategy.ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = make_mesh("cpu", world, strategy.replicas)
    warm = torch.randn(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()  # type: ignore[no-untyped-call]
    dist.all_reduce(torch.ones(1 << 10))
    cpu = torch.device("cpu")
    model = load_policy_model(config.model, folder, cpu, 0, hollow="shapes")
    full = full_batches(config)
    gc.collect()
    before = resident("VmRSS")
    learning = make_learner(
        config, Roles(config), model, model.config.vocab_size, folder, mesh, Drawn
    )
    found: dict[str, int] = {}
    last: list[str] = []

    def begin(phase: str) -> None:
        if last:
            found[last[-1]] = resident("VmHWM") - before
        last.append(phase)
        Path("/proc/self/clear_refs").write_text("5")

    run_phases(config, learning, full, begin)
    begin("end")
    print(json.dumps({phase: size / GIB for phase, size in found.items()}), flush=True)
    dist.barrier()
    os._exit(0)


def measured(name: str, folder: str) -> dict[str, float]:
    """Run a configuration on its ranks; returns GiB by phase."""
    ranks = CONFIGURATIONS[name][1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as store:
        words = [sys.executable, "-m", "benchmarks.plan", "--rank"]
        processes = [
            subprocess.Popen(
                [*words, str(rank), "--folder", folder, "--store", f"{store}/s", "--only", name],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        out = [process.communicate()[0] for process in processes]
    found = [json.loads(text.strip().splitlines()[-1]) for text in out]
    return {phase: max(each[phase] for each in found) for phase in found[0]}


LARGE = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
LARGE |= {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064}
LAYOUT = (
    *("cluster.share_devices=false", "rollout/engine=vllm"),
    *("rollout.engine.tensor_parallel=4", "rollout.engine.processes=16"),
)


def describe(folder: str, sizes: dict[str, int], positions: int) -> None:
    """Write a config.json."""
    told = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    whole = told | sizes | {"max_position_embeddings": positions}
    Path(folder, "config.json").write_text(json.dumps(whole))


def cost_of_32b() -> str:
    """Plan 32B on 128 ranks, beside engines on 64 GPUs; say what that took, and what it found."""
    with tempfile.TemporaryDirectory() as folder:
        describe(folder, LARGE, 131072)
        words = ["dapo_qwen2.5_32b", f"model.path={folder}", *LAYOUT, "--nodes", "24", "--json"]
        command = [str(Path(sys.executable).with_name("winnow")), "plan", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        plan, before = json.loads(process.stdout.read()), os.getloadavg()[0]
        used = os.wait4(process.pid, 0)[2]
    memory, run = plan["memory"], plan["run"]
    return (
        f"`winnow plan dapo_qwen2.5_32b {' '.join(LAYOUT)} --nodes 24` (128 ranks) took "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU and {used.ru_maxrss / 2**20:.3f} GiB (load "
        f"average {before:.1f}). Of its ranks each holds {memory['peak_gib']:.2f} GiB at the peak, "
        f"in the {memory['peak_within']}, of {memory['limit_gib']:.1f}; lockstep "
        f"{plan['learning']['lockstep']:.3f}, a step of {run['step_seconds']:.0f} s at least, MFU "
        f"{run['mfu']:.3f} at most; faults: {len(plan['faults'])}.\n"
    )


PUBLISHED = {
    "0.6B, 16k, 1 x H100": ("qwen3-0.6b", 16384, 1, "h100", False, 12.53, 0.996, 1.38),
    "0.6B, 65k, 1 x H100": ("qwen3-0.6b", 65536, 1, "h100", False, 19.56, 6.088, 6.46),
    "0.6B LoRA, 16k, 1 x H100": ("qwen3-0.6b", 16384, 1, "h100", True, 5.1, 1.23, 1.23),
    "4B, 16k, 8 x H100": ("qwen3-4b", 16384, 8, "h100", False, 17.10, 2.344, 5.04),
    "4B, 65k, 8 x H200": ("qwen3-4b", 65536, 8, "h200", False, 36.10, 14.945, 17.75),
    "4B LoRA, 65k, 1 x H100": ("qwen3-4b", 65536, 1, "h100", True, 42.0, 15.74, 15.74),
    "30B-A3B, 16k, 8 x H100": ("qwen3-30b-a3b", 16384, 8, "h100", False, 74.59, 4.087, 21.44),
}
"""Rows of prime-rl's benchmarks/baselines (RL trainer, January and February 2026): model, tokens of
the sequence of a micro-batch, GPUs, whether LoRA of rank 16; peak GiB; seconds of a micro-batch by
step_time, and by throughput, in which full rows write their weights between steps."""


def published() -> str:
    """Plan what prime-rl published, and return a table of both."""
    import winnow.plan
    from winnow.config.load import load_recipe
    from winnow.plan.estimate import ENGINE_GB_S, PEAK, Efficiency, Machine, find_gpu
    from winnow.plan.rank import run_rank

    lines = ["| row | GiB | published | off | s at least | expected | step_time | expected / it |"]
    lines[0] += " with publication | throughput | expected / it |"
    lines.append("|---" * 11 + "|")
    for name, (model, tokens, ranks, gpu, is_lora, gib, step_s, all_s) in PUBLISHED.items():
        folder = str(Path(winnow.plan.__file__).with_name("shapes") / model)
        own = [f"model.path={folder}", "data.max_prompt_tokens=1024", *BASE[3:]]
        own += [f"rollout.max_response_tokens={tokens - 1024}", "trainer.mini_batch_groups=null"]
        own += [f"trainer.microbatch_tokens={tokens}", "trainer/strategy=fsdp2"]
        own += [f"{STRATEGY}ranks={ranks}", *(["model/adapter=lora"] if is_lora else [])]
        rank = run_rank(load_recipe("dapo_qwen2.5_32b", own), folder)
        update, optimizer = (rank.tracker.phases[f"policy {x}"] for x in ("update", "optimizer"))
        peak = rank.tracker.peak("policy update").bytes / GIB
        # prime-rl keeps frozen weights in float32, where the plan has them in bfloat16.
        peak += 2 * rank.parameters["policy"] * is_lora / GIB
        both = []
        for efficiency in (PEAK, Efficiency()):
            machine = Machine(*find_gpu(gpu), 1, 8, efficiency)
            times = (machine.phase_seconds(rank.strategy, x, 0.5, 0.5) for x in (update, optimizer))
            both.append(sum(times))  # two micro-batches a step
        least, likely = both
        whole = likely + rank.parameters["policy"] * (not is_lora) / ENGINE_GB_S / 1e9
        lines.append(
            f"| {name} | {peak:.2f} | {gib:.2f} | {peak / gib - 1:+.1%} | {least:.2f} "
            f"| {likely:.2f} | {step_s:.2f} | {likely / step_s:.2f} | {whole:.2f} | {all_s:.2f} "
            f"| {whole / all_s:.2f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--folder", default="")
    parser.add_argument("--store", default="")
    asked = parser.parse_args()
    if asked.published:
        table = published()
        if asked.out is not None:
            asked.out.write_text(table)
        return
    if asked.rank is not None:
        be_rank(asked.only[0], asked.folder, asked.store, asked.rank)
    rows: list[tuple[str, float, float]] = []
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            describe(folder, CONFIGURATIONS[name][0], 4096)
            began = time.monotonic()
            plan, real = planned(name, folder), measured(name, folder)
        phase = max(plan, key=plan.__getitem__)
        print(name, f"{time.monotonic() - began:.0f} s", flush=True)
        for each, size in plan.items():
            print(f"    {each:18s} {size:.3f} {real[each]:.3f} {real[each] - size:+.3f}")
        rows.append((name, plan[phase], max(real.values())))
    constant = statistics.median(most - least for _, least, most in rows)
    lines = ["| configuration | planned, GiB | measured | above the plan | after the constant |"]
    lines.append("|---|---|---|---|---|")
    for name, least, most in rows:
        error = (least + constant) / most - 1
        lines.append(f"| {name} | {least:.3f} | {most:.3f} | {most - least:+.3f} | {error:+.1%} |")
    text = "\n".join(lines) + f"\n\nThe constant, the median of what is above: {constant:.3f} GiB\n"
    text += f"\n## 32B on 128 ranks\n\n{cost_of_32b()}"
    print(text)
    if asked.out is not None:
        heading = (
            "# A plan's memory against real ranks\n\nMade by `python -m benchmarks.plan --out "
            f"benchmarks/results/plan.md` (load average {os.getloadavg()[0]:.1f}).\n\n"
        )
        asked.out.write_text(heading + text)


if __name__ == "__main__":
    main()
