"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from winnow.plan.estimate import Figures

_TENSORS = 8
"""Kinds of tensors that are listed."""


def as_text(plan: Figures) -> str:
    """Write a plan down for people."""
    return "\n".join(_lines(plan))


def _lines(plan: Figures) -> Iterator[str]:
    machine, memory = plan["machine"], plan["memory"]
    size = f"{machine['nodes']} x {machine['per_node']} {machine['gpu']}"
    models = ", ".join(f"{role} {n / 1e9:.2f} B" for role, n in plan["parameters"].items())
    yield f"{plan['recipe']} on {size} ({machine['gpu_gib']:g} GiB): {models}"
    if plan["overrides"]:
        yield f"  with {' '.join(plan['overrides'])}"
    for fault in plan["faults"]:
        yield f"FAULT: {fault}"
    change = plan.get("change")
    if change is not None:
        yield f"FITS with {' '.join(change['set'])}: {change['peak_gib']:.1f} GiB a rank"
    elif "change" in plan:
        yield "No change that was tried lets a rank fit; use more ranks, or GPUs with more memory"
    yield ""
    yield (
        f"Memory of a rank: {memory['peak_gib']:.2f} GiB of tensors at the peak, in the "
        f"{memory['phase']}; room for {memory['limit_gib']:.1f}"
    )
    if memory["host_gib"]:
        yield f"  and {memory['host_gib']:.2f} GiB on the host (offloaded)"
    yield "  " + ", ".join(f"{role} {gib:.2f}" for role, gib in memory["roles"].items())
    for each in memory["tensors"][:_TENSORS]:
        told = f"{each['made_by'].strip()} {each['shape']}".strip()
        yield f"  {each['gib']:8.2f} GiB  {each['count']:4d} x {each['role']}: {told}"
    yield from _course(plan)


def _course(plan: Figures) -> Iterator[str]:
    engine, run = plan["engine"], plan["run"]
    yield ""
    yield f"Lengths: {plan['lengths']} tokens"
    yield (
        f"Lockstep: {plan['lockstep']:.3f} ({plan['updates']} updates of "
        f"{plan['rounds']:.1f} micro-batches a rank)"
    )
    sent = ", ".join(f"{kind} {gib:,.1f}" for kind, gib in plan["sent_gib"].items())
    yield f"A rank's collectives, GiB a step: {sent or 'none'}"
    yield (
        f"Engines: {engine['engines']} of {engine['tensor_parallel']} GPUs, "
        f"{engine['weights_gib']:.1f} GiB of weights and {engine['cache_gib']:.1f} of keys and "
        f"values on each: {engine['rows_longest']} answers of the longest kind at once, "
        f"{engine['rows_mean']} of mean length"
    )
    yield "At least so many seconds a step (roofline):"
    for name, seconds in plan["seconds"].items():
        yield f"  {seconds:10.1f}  {name}"
    if run is None:
        yield "  no figures of the whole run, as no engine fits"
        return
    yield f"  {run['step_seconds']:10.1f}  in all: at most {plan['mfu']:.1%} MFU"
    yield (
        f"Run: {run['steps']:,} steps, {run['tokens'] / 1e9:.2f} B tokens written, at least "
        f"{run['hours']:,.1f} hours ({run['gpu_hours']:,.0f} GPU hours)"
        + (f", {run['cost']:,.0f} at the price given" if "cost" in run else "")
    )
