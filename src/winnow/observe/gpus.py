"""Speeds and memory of kinds of GPU, from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Gpu(NamedTuple):
    """Speed and memory of a GPU."""

    bfloat16: float
    """Peak without sparsity, TFLOP/s."""
    float32: float
    """Peak without TF32, TFLOP/s."""
    memory_gib: float
    memory_gb_s: float
    """Reading or writing its own memory."""
    link_gb_s: float
    """To a GPU of the same node, one way: NVLink where the form has it, else PCIe."""


GPUS: Mapping[str, Gpu] = {
    "H100 PCIe": Gpu(756.0, 51.0, 80, 2039, 64),
    "H100 NVL": Gpu(835.0, 60.0, 94, 3938, 300),
    "H100": Gpu(989.0, 67.0, 80, 3350, 450),
    "H200 NVL": Gpu(835.0, 60.0, 141, 4800, 450),
    "H200": Gpu(989.0, 67.0, 141, 4800, 450),
    "H20": Gpu(148.0, 44.0, 96, 4000, 450),
    "H800 PCIe": Gpu(756.0, 51.0, 80, 2039, 64),
    "H800": Gpu(989.0, 67.0, 80, 3350, 200),
    "GH200": Gpu(989.0, 67.0, 96, 4000, 450),
    "GH200 144": Gpu(989.0, 67.0, 144, 4900, 450),
    "GB200": Gpu(2500.0, 80.0, 186, 8000, 900),
    "B200": Gpu(2250.0, 75.0, 180, 8000, 900),
    "A100": Gpu(312.0, 19.5, 80, 2039, 300),
    "A100 40": Gpu(312.0, 19.5, 40, 1555, 300),
    "A800": Gpu(312.0, 19.5, 80, 2039, 200),
    "A40": Gpu(149.7, 37.4, 48, 696, 32),
    "A30": Gpu(165.0, 10.3, 24, 933, 32),
    "A10": Gpu(125.0, 31.2, 24, 600, 32),
    "L40S": Gpu(362.0, 91.6, 48, 864, 32),
    "L40": Gpu(181.0, 90.5, 48, 864, 32),
    "L20": Gpu(119.5, 59.8, 48, 864, 32),
    "L4": Gpu(121.0, 30.3, 24, 300, 32),
    "RTX 4090": Gpu(165.2, 82.6, 24, 1008, 32),
    "RTX 3090": Gpu(71.0, 35.6, 24, 936, 32),
}
"""From NVIDIA's data sheets of each (those of HGX and GB200 NVL72 by the GPU, of GeForce the white
papers); H20, H800, A800 and L20, which have none in public, as makers of servers give them. NVLink
of NVL forms joins two or four GPUs. A GPU goes by the longest name that its own holds."""

GPU_NAMES = tuple(name.lower().replace(" ", "-") for name in GPUS)
"""As a user types them."""
