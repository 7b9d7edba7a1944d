"""Decoding from pages equals decoding from slots. The kernel itself runs on a TPU only: a plain function stands in."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from seed_jax import aot, sharding
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.sampler import decode, paged, weights

SPEC = ModelSpec(vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
SLOTS, COLUMNS, STEPS, PIECE = 3, 320, 4, 128


def plain_attention(q, pages, lengths, table, starts, sequences):
    """What the kernel computes, by its documentation: queries are the last tokens of their sequence, and causal."""
    rows = table.shape[0]
    span = pages[table].reshape(rows, -1, *pages.shape[2:])  # [R, S, 2 K, hd]
    owner = jnp.searchsorted(starts, jnp.arange(q.shape[0]), side="right") - 1
    position = lengths[owner] - starts[owner + 1] + jnp.arange(q.shape[0])
    keys, values = (jnp.repeat(span[owner, :, part::2], q.shape[1] // SPEC.num_kv_heads, axis=2) for part in (0, 1))
    scores = jnp.einsum("qhd,qshd->qhs", q, keys) * q.shape[2] ** -0.5
    seen = jnp.arange(span.shape[1]) <= position[:, None]
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("qhs,qshd->qhd", shares, values)


def test_pages_equal_slots(monkeypatch):
    """Two prompts of one piece and one of two, then two decode calls."""
    monkeypatch.setattr(paged, "ragged_attention", plain_attention)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), sharding.MESH_AXES)
    params = weights.load(init_params(SPEC, jax.random.PRNGKey(0)), SPEC, mesh, jnp.float32)
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 61, (SLOTS, PIECE)).astype(np.int32) for _ in range(2)]
    lengths = np.array([100, 3, 201])
    floats = np.tile(np.array([1.0, 1.0, 0.0], np.float32), (SLOTS, 1))
    results = []
    for module, shapes, extra, more in (
        (decode, decode.cache_shapes(SPEC, SLOTS, COLUMNS), {}, {}),
        (paged, paged.pages_shapes(SPEC, SLOTS, COLUMNS), {"columns": COLUMNS}, {"mesh": mesh}),
    ):
        cache = jax.tree.map(lambda shape: jnp.zeros(shape), shapes, is_leaf=lambda s: isinstance(s[0], int))
        fill = jax.jit(
            functools.partial(module.prefill, spec=SPEC, attention="dense", mesh=mesh, **extra),
            static_argnames="window",
        )
        slots = np.array([2, 0, 1], np.int32)  # the rows of a call and the slots they go to differ
        order = np.argsort(slots)
        cache = fill(params, cache, pieces[0], slots, np.zeros(SLOTS, np.int32), np.int32(3), window=0)
        second = np.array([1, 2, 0], np.int32)  # slot 2 goes on; the other rows of this call are padding
        cache = fill(
            params, cache, pieces[1], second[[1, 0, 2]], np.full(SLOTS, PIECE, np.int32), np.int32(1), window=128
        )
        step = jax.jit(functools.partial(module.decode, spec=SPEC, stop_ids=(), **extra, **more))
        ints = np.stack([pieces[0][order, 5], lengths, [8, 8, 6], [0, 0, 0]], axis=1).astype(np.int32)
        outs = []
        for call in range(2):
            draws = np.random.default_rng(call).random((SLOTS, STEPS, 2), np.float32)
            cache, out = step(params, cache, ints, floats, draws)
            outs.append([np.asarray(part) for part in out])
            ints[:, 0], ints[:, 1], ints[:, 2] = outs[-1][0][:, -1], ints[:, 1] + STEPS, ints[:, 2] - STEPS
        results.append(outs)
    for slots_out, pages_out in zip(*results, strict=True):
        np.testing.assert_array_equal(slots_out[0], pages_out[0])
        np.testing.assert_allclose(slots_out[1], pages_out[1], atol=1e-4)
        np.testing.assert_array_equal(slots_out[3], pages_out[3])
    assert [out[3].tolist() for out in results[0]] == [[4, 4, 4], [4, 4, 2]]


def test_a_slot_is_whole_pages():
    with pytest.raises(ValueError, match="100 columns are no multiple of the page of 64"):
        paged.pages_shapes(SPEC, 2, 100)


@pytest.mark.slow
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_programs_compile_for_a_tpu_host():
    """Two layers of Qwen2.5-3B's widths on four v5e chips that share a replica: both caches, both programs."""
    import json
    import os
    import subprocess
    import sys

    program = (
        "import dataclasses, json; import jax.numpy as jnp; from seed_jax import aot\n"
        "from seed_jax.compile_check import chip_bytes; from seed_jax.models import published\n"
        "from seed_jax.sampler import aot as programs; from seed_jax.sampler.rooms import make_room\n"
        "spec = dataclasses.replace(published.spec('qwen2.5-3b'), num_layers=2)\n"
        "mesh, room = aot.topology_mesh('v5e:2x2', tensor=4), make_room('acting', 8, 2048, 512, 128)\n"
        "common = spec, mesh, room, jnp.dtype('bfloat16')\n"
        "cache = chip_bytes(programs.abstract_cache(*common))\n"
        "lowered = [programs.lower_decode(*common), programs.lower_paged('decode', *common, 512),\n"
        "           programs.lower_paged('prefill', *common, 512, 4096)]\n"
        "for memory in [low.compile().memory_analysis() for low in lowered]:\n"
        "    print(json.dumps([cache, memory.argument_size_in_bytes, memory.temp_size_in_bytes]))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.strip().splitlines()]
    assert len(reports) == 3
    for cache, arguments, temporary in reports:
        # A quarter of the weights, and one kv head of two: columns x 2 layers x keys and values x 128 x 2 bytes
        assert cache == 8 * 2568 * 2 * 2 * 128 * 2
        assert cache < arguments < 0.3e9
        assert temporary < 0.1e9
