"""Notes on a recipe and this machine, before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.recipes import recipe

from winnow.builders.preflight import bfloat16_notes


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("fpu sse2 avx2 avx512f", True),
        ("fpu avx512f avx512_bf16", False),
        ("amx_bf16 amx_tile", False),
        ("asimd bf16", False),
    ],
)
def test_bfloat16_on_a_cpu_without_its_instructions_is_warned_of(
    flags: str, warns: bool, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\nbogomips : 5000\n")
    half = "model.dtype=bfloat16", "run.device=cpu"
    lines = bfloat16_notes(recipe("quickstart", *half), str(cpuinfo))
    assert [line.startswith("Warning: model.dtype=bfloat16") for line in lines] == [True] * warns
    assert bfloat16_notes(recipe("quickstart", "run.device=cpu"), str(cpuinfo)) == []
    on_gpus = "cluster=ray", "trainer/strategy=fsdp2", "model.dtype=bfloat16"
    assert bfloat16_notes(recipe("quickstart", *on_gpus), str(cpuinfo)) == []
    assert bfloat16_notes(recipe("quickstart", *half), str(tmp_path / "none")) == []
