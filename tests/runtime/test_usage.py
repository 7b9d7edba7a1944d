"""Peak rates, FLOPs of a forward pass, programs that are compiled again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.runtime import usage

QWEN = ModelSpec(vocab_size=151936, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=2, head_dim=128, d_ff=11008)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H200", 989e12),
        ("cpu", None),
        ("TPU v99", None),
    ],
)
def test_peak_by_kind(kind, peak):
    assert usage.peak_flops(SimpleNamespace(device_kind=kind)) == peak


def test_forward_flops_count_every_matrix_twice():
    table = spec_lib.weights(QWEN)
    matrices = sum(math.prod(w.shape) for w in table["layers"].values() if w.transpose)
    assert usage.forward_flops(QWEN, 10, 3) == 2 * (10 * matrices + 3 * 151936 * 2048)
    assert usage.forward_flops(QWEN, 1, 0) == pytest.approx(2 * 2.775e9, rel=1e-3)  # the body of Qwen2.5-3B


def test_a_cpu_tells_no_memory():
    assert usage.memory_gb() is None


def test_only_what_is_compiled_again_is_named(monkeypatch):
    monkeypatch.setattr(usage, "SLOW_COMPILE_S", 0.0)

    @jax.jit
    def grown(x):
        return jnp.cos(x) + 1

    two, three = jnp.ones(2), jnp.ones(3)
    with usage.Compilations() as compilations:
        grown(two)
        metrics, again = compilations.collect()
        assert metrics["compile/programs"] == 1 and metrics["compile/seconds"] > 0 and again == []
        grown(two)
        assert compilations.collect()[0]["compile/programs"] == 0
        grown(three)
        metrics, again = compilations.collect()
    assert metrics["compile/programs"] == 1
    (text,) = again
    assert text.startswith("jit(grown) (") and text.endswith(" s)")
    grown(jnp.ones(4))
    assert compilations.collect()[0]["compile/programs"] == 0, "it listens while it is open only"


def test_profile_only_if_wanted(tmp_path):
    with usage.profiled(tmp_path / "no", False):
        pass
    assert not (tmp_path / "no").exists()
    with usage.profiled(tmp_path / "yes", True):
        jnp.ones(3).block_until_ready()
    assert [path for path in (tmp_path / "yes").rglob("*.xplane.pb")]
