"""Settings of the host that make JAX on a CPU fast. They do nothing elsewhere."""

from __future__ import annotations

import ctypes
import os
import re
import sys

import jax

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # parameters of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Tells glibc's malloc not to unmap what is freed. Returns whether it could (Linux with glibc).

    XLA on CPU allocates its temporary buffers anew for each call. By default each comes as fresh zero pages: a
    training step of the
    quickstart model caused 140,000 page faults, 28 % of its CPU time; with this setting 20,000 and 5 %. Call before
    the first jitted call.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_every_core(rows: int) -> None:
    """On a CPU: one JAX device a core (a power of two that divides `rows`, the smallest batch), for data parallelism.

    XLA runs most operations of one CPU device on one core. Forward and backward of the quickstart model (36 rows of 160
    tokens, two cores) took 0.60 s with one device and 0.36 s with two; with the larger thread pool set here, 0.40 s.
    A wide model is another matter: at width 512 one device, whose large products use all cores, is 1.5 times as fast as
    two (XLA_FLAGS=--xla_force_host_platform_device_count=1).
    Call before anything touches a device; a device count in XLA_FLAGS wins.

    A device that waits in a collective blocks one thread of XLA's pool. With as few threads as devices, a few programs
    in flight can block them all: a training run hung after 200 steps. So the pool gets two threads a device, however
    many there are, and callers wait for each program before they start the next.
    """
    if given := re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault("PJRT_NPROC", str(2 * int(given[1])))
        return
    cores, count = usable_cores(), 1
    while count * 2 <= cores and rows % (count * 2) == 0:
        count *= 2
    os.environ.setdefault("PJRT_NPROC", str(2 * count))
    jax.config.update("jax_num_cpu_devices", count)
