"""Counting in HLO text: against arithmetic on programs whose work is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from seed_jax import hlo, sharding


def compiled_text(function, *shapes) -> str:
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_a_scan_counts_as_often_as_it_runs():
    def scan(x, weights):
        return jax.lax.scan(lambda carry, weight: (jnp.tanh(carry @ weight), None), x, weights)[0]

    cost = hlo.cost(compiled_text(scan, (32, 48), (7, 48, 48)))
    assert cost.flops == 7 * 2 * 32 * 48 * 48
    assert cost.unknown_loops == 0
    weights = 7 * 48 * 48 * 4  # each layer's are read once, not all of them in every round
    assert weights < cost.bytes < 7 * weights


def test_a_bound_that_only_the_run_knows():
    def loop(x, weight, rounds):
        return jax.lax.fori_loop(0, rounds[0].astype(jnp.int32), lambda _, x: x @ weight, x)

    text = compiled_text(loop, (8, 16), (16, 16), (1,))
    assert hlo.cost(text, rounds_unknown=5).flops == 5 * 2 * 8 * 16 * 16
    assert hlo.cost(text, rounds_unknown=5).unknown_loops == 1


def test_received_bytes():
    """Eight devices: a gather brings 7/8 of its result, a sum twice 7/8 of it."""
    mesh = sharding.make_mesh(fsdp=8)
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))

    def run(function, out):
        x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split)
        return hlo.cost(jax.jit(function, out_shardings=out).lower(x).compile().as_text()).collectives

    assert run(lambda x: x * 2, whole) == {"all-gather": 7 / 8 * 64 * 32 * 4}
    assert run(lambda x: x.sum(0), whole) == {"all-reduce": 2 * 7 / 8 * 32 * 4}


# What the TPU compiler writes: a product as a convolution whose padding lets one of 16 taps count, a loop in steps of
# two, and one gather spread over two fusions with one channel.
GATHER = "channel_id=8, replica_groups=mesh['a'=16] {'a'}, dimensions={1}"
X, STATE = "bf16[4,16,1,64]{3,2,1,0:T(8,128)(2,1)}", "(u32[]{:T(128)}, bf16[4,16,1,64]{3,2,1,0:T(8,128)(2,1)})"
TPU_TEXT = f"""HloModule jit_step, is_scheduled=true

%fused_start (p.0: bf16[1,128,64]) -> bf16[1,2048,64] {{
  %p.0 = bf16[1,128,64]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %all-gather.1 = bf16[1,2048,64]{{2,1,0:T(8,128)(2,1)}} all-gather(%p.0), {GATHER}
}}

%fused_done (p.1: bf16[1,128,64]) -> bf16[1,2048,64] {{
  %p.1 = bf16[1,128,64]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %all-gather.2 = bf16[1,2048,64]{{2,1,0:T(8,128)(2,1)}} all-gather(%p.1), {GATHER}
}}

%cond (c.0: (u32[], bf16[4,16,1,64])) -> pred[] {{
  %c.0 = {STATE} parameter(0)
  %limit = u32[]{{:T(128)}} constant(8)
  %i = u32[]{{:T(128)}} get-tuple-element(%c.0), index=0
  ROOT %compare.1 = pred[]{{:T(512)}} compare(%i, %limit), direction=LT
}}

%body (b.0: (u32[], bf16[4,16,1,64])) -> (u32[], bf16[4,16,1,64]) {{
  %b.0 = {STATE} parameter(0)
  %two = u32[]{{:T(128)}} constant(2)
  %j = u32[]{{:T(128)}} get-tuple-element(%b.0), index=0
  %x = {X} get-tuple-element(%b.0), index=1
  %cp = (bf16[9,64]{{1,0}}, bf16[9,64]{{1,0}}, u32[]{{:S(2)}}) collective-permute-start(%x), channel_id=3
  %next = u32[]{{:T(128)}} add(%j, %two)
  ROOT %t.1 = {STATE} tuple(%next, %x)
}}

ENTRY %main (a.0: bf16[4,16,1,64], a.1: bf16[1,16,64,128], a.2: bf16[1,128,64]) -> bf16[4,16,16,128] {{
  %a.0 = {X} parameter(0)
  %a.1 = bf16[1,16,64,128]{{3,2,1,0:T(8,128)(2,1)}} parameter(1)
  %a.2 = bf16[1,128,64]{{2,1,0:T(8,128)(2,1)}} parameter(2)
  %zero = u32[]{{:T(128)}} constant(0)
  %start = bf16[1,2048,64]{{2,1,0:T(8,128)(2,1)S(1)}} fusion(%a.2), kind=kCustom, calls=%fused_start
  %done = bf16[1,2048,64]{{2,1,0:T(8,128)(2,1)S(1)}} fusion(%a.2), kind=kCustom, calls=%fused_done
  %t.0 = {STATE} tuple(%zero, %a.0)
  %while.1 = {STATE} while(%t.0), condition=%cond, body=%body
  ROOT %convolution.1 = bf16[4,16,16,128]{{3,2,1,0}} convolution(%a.0, %a.1), window={{size=1x16 pad=0_0x15_15 \
rhs_reversal=0x1}}, dim_labels=b01f_01io->b01f
}}
"""


def test_text_of_the_tpu_compiler():
    cost = hlo.cost(TPU_TEXT)
    assert cost.flops == 2 * (4 * 16) * 64 * (16 * 128)  # [64, 64] x [64, 16 * 128]
    assert cost.collectives == {"all-gather": 15 / 16 * 2048 * 64 * 2, "collective-permute": 4 * 9 * 64 * 2}


@pytest.mark.parametrize(("name", "products"), [("fwd_segmented_no_residuals.5", 2), ("dkv_x", 4), ("dq_x", 3)])
def test_attention_kernels_count_half_of_all_pairs(name, products):
    q, k = "bf16[4,16,4096,128]{3,2,1,0}", "bf16[4,2,4096,128]{3,2,1,0}"
    text = (
        f"ENTRY %main (t: s8[1,8,8]) -> {q} {{\n  %t = s8[1,8,8]{{2,1,0}} parameter(0)\n  %q = {q} parameter(1)\n"
        f"  %k = {k} parameter(2)\n"
        f'  ROOT %splash_mha_{name} = {q} custom-call(%t, %q, %k, %k), custom_call_target="tpu_custom_call"\n}}\n'
    )
    pairs = np.tril(np.ones((4096, 4096))).sum()
    assert hlo.cost(text).flops == pytest.approx(products * 2 * 4 * 16 * 128 * pairs, rel=1e-3)
