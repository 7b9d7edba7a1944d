"""XLA flags of the tests: they count only if they are set before jax is imported.

Most programs here are run a few times only, so what counts is how long they take to compile. Without LLVM's
optimizations and the fusion emitters, five tests of train/test_update.py take 21 s of processor time instead of 62 s.
"""

from __future__ import annotations

QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def flags(devices: int, quick: bool = True) -> str:
    """The value of XLA_FLAGS for so many virtual CPU devices."""
    count = f"--xla_force_host_platform_device_count={devices}"
    return f"{count} {QUICK_COMPILATION}" if quick else count
