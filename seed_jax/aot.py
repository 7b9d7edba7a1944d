"""Programs compiled for TPU slices on a host without a TPU: does it compile, how much memory does a chip need?

Needs libtpu, which compiles on any x86 Linux host (requirements-tpu-check.txt). Nothing is run. Start the process with
JAX_PLATFORMS=cpu, so that jax does not look for a TPU. Three conditions, all met here: the program is lowered inside
`jax.set_mesh` of the slice, kernels have explicit block sizes, and their tables are made without a device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax.models import spec as spec_lib
from seed_jax.models.logprobs import scored_logprobs
from seed_jax.models.spec import ModelSpec
from seed_jax.objectives.policy_loss import ppo_clip
from seed_jax.runtime.usage import PEAK_FLOPS


class Chip(NamedTuple):
    """What one chip has: memory in bytes, peak bfloat16 FLOP/s, bytes/s of HBM and of the network between chips (one
    way). Source: the system architecture pages of Cloud TPU (cloud.google.com/tpu/docs/v5e, v5p, v6e)."""

    hbm_bytes: float
    flops: float
    hbm_bytes_s: float
    network_bytes_s: float


CHIPS = {
    "v5e": Chip(16e9, PEAK_FLOPS["TPU v5e"], 819e9, 200e9),
    "v5p": Chip(95e9, PEAK_FLOPS["TPU v5p"], 2765e9, 600e9),
    "v6e": Chip(32e9, PEAK_FLOPS["TPU v6e"], 1640e9, 400e9),
}


class TopologyError(ValueError):
    """There is no such slice, or nothing here that can compile for one."""


class Workload(NamedTuple):
    """One gradient: packed rows, tokens of a row, scored tokens of a row, and how the model computes them.

    head_tokens: tokens (over all rows) whose logits exist at the same time
    """

    rows: int
    row_tokens: int
    scored_tokens: int
    remat: str = "full"
    attention: str = "splash"
    dtype: str = "bfloat16"
    head_tokens: int = 2048


class Report(NamedTuple):
    """Sizes in bytes on one chip; temp_bytes is what the program needs beside its arguments and results."""

    lower_s: float
    compile_s: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int


def missing() -> str | None:
    """Why nothing can be compiled for a TPU here, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed; pip install -r requirements-tpu-check.txt"
    return None


def chip(topology: str) -> Chip:
    """The chip of a slice such as "v5e:4x4". Raises TopologyError for an unknown one."""
    kind, _, grid = topology.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", grid):
        raise TopologyError(
            f"topology {topology!r} is not known; use KIND:GRID with KIND one of {', '.join(CHIPS)} and GRID the "
            "chips along each axis, such as v5e:4x4, v5p:2x2x2 or v6e:2x4"
        )
    return CHIPS[kind]


def topology_devices(topology: str) -> list[jax.Device]:
    """The chips of a slice that need not exist. Raises TopologyError for an unknown one, or without libtpu."""
    from jax.experimental import topologies

    chip(topology)
    problem = missing()
    if problem is not None:
        raise TopologyError(problem)
    # libtpu would ask a metadata server that only cloud hosts have, and find them missing with many words.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used, so other processes are no conflict
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # the runtime's own error types differ between versions
        reason = str(error).strip().splitlines()[0][:200]
        raise TopologyError(f"topology {topology!r} cannot be compiled for: {reason}") from error


def topology_mesh(name: str, tensor: int = 1, fsdp: int = -1) -> Mesh:
    """A mesh [fsdp, tensor] over the chips of a slice that need not exist, such as "v5e:4x4" or "v5p:2x2x1"."""
    return sharding.make_mesh(topology_devices(name), fsdp=fsdp, tensor=tensor)


def compile_with_text(lowered: Any) -> tuple[Any, str]:
    """(compiled program, its optimized HLO as the compiler dumps it).

    `compiled.as_text()` would have jaxlib read what libtpu wrote, and jaxlib 0.10.2 cannot read some programs for v5p
    and v6e (copies on their sparse cores: "async-update instruction should have 1 operands but sees 3").
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        (dumped,) = Path(folder).glob("*.after_optimizations.txt")
        return compiled, dumped.read_text()


def policy_gradient(spec: ModelSpec, mesh: Mesh, work: Workload) -> Any:
    """Lowered value and gradient of the clipped policy loss; parameters in `work.dtype`, gradients placed like them."""
    places = sharding.param_shardings(spec, mesh, "train")
    params = spec_lib.map_weights(
        lambda weight, place: jax.ShapeDtypeStruct(weight.shape, jnp.dtype(work.dtype), sharding=place), spec, places
    )

    def per_row(count: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((work.rows, count), dtype, sharding=sharding.batch_sharding(mesh))

    tokens = (per_row(work.row_tokens, jnp.int32),) * 3
    targets = per_row(work.scored_tokens, jnp.int32)
    old, advantages = (per_row(work.scored_tokens, jnp.float32),) * 2
    mask = per_row(work.scored_tokens, jnp.bool_)

    def loss(params, tokens, segment_ids, positions, targets, old, advantages, mask):
        logp, _ = scored_logprobs(
            params, spec, tokens, segment_ids, positions, targets,
            chunk=work.head_tokens, remat=work.remat, dtype=jnp.dtype(work.dtype), attention=work.attention, mesh=mesh,
        )  # fmt: skip
        return ppo_clip(logp, old, advantages, mask)[0]

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(sharding.replicated(mesh), places))
    with jax.set_mesh(mesh):
        return step.lower(params, *tokens, targets, old, advantages, mask)


def compile_report(spec: ModelSpec, mesh: Mesh, work: Workload) -> Report:
    """Compiles `policy_gradient` and says what it needs."""
    start = time.perf_counter()
    lowered = policy_gradient(spec, mesh, work)
    middle = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    return Report(
        lower_s=middle - start,
        compile_s=time.perf_counter() - middle,
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
    )
