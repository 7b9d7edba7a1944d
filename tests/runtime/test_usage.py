"""Peak rates, FLOPs of a forward pass, programs that are compiled again."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.runtime import usage
from seed_jax.runtime.logging import PhaseTimer
from seed_jax.train.metrics import memory_metrics, update_metrics
from tests import tiny
from tests.updating import make_config

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


def test_forward_flops_of_the_vision_tower():
    """Four patches of a cell pass every matrix of the layers and the patch's, of which both frames hold the image."""
    seeing = tiny.vision_spec(50)
    table = spec_lib.weights(seeing)["vision"]
    size = lambda part: sum(math.prod(w.shape) for w in part.values() if len(w.hf_shape) > 1)  # noqa: E731
    patch = math.prod(table["patch"].shape) // 2
    cell = 4 * (size(table["layers"]) + patch) + size(table["merger"])
    assert usage.forward_flops(seeing, 10, 3, 5) - usage.forward_flops(seeing, 10, 3) == 2 * 5 * cell


def test_a_cpu_tells_no_memory():
    assert usage.memory_gb() is None


def test_memory_of_the_fullest_device_by_phase(monkeypatch):
    used = {"bytes_in_use": 1e9, "peak_bytes_in_use": 5e9}
    devices = [SimpleNamespace(memory_stats=lambda: used), SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 2e9})]
    monkeypatch.setattr(usage.jax, "local_devices", lambda: devices)
    assert usage.memory_gb() == (2.0, 5.0)
    timer = PhaseTimer(memory=lambda: usage.memory_gb()[0])
    with timer("update"):
        used["bytes_in_use"] = 7e9
    assert memory_metrics(timer.memory_by_phase) == {"hbm/update_gb": 7.0, "hbm/peak_gb": 5.0}


@pytest.mark.parametrize(
    ("method", "changes", "passes"),
    [
        ("grpo", {"old_logprobs": "sampler"}, (3, 0)),  # forward, and backward as two forwards
        ("grpo", {"old_logprobs": "recompute"}, (4, 0)),
        ("seed", {"old_logprobs": "recompute", "loss__kl_coef": 0.1}, (5, 1)),
        ("seed_current", {"old_logprobs": "sampler"}, (3, 2)),  # once for what is measured, once in every step
    ],
)
def test_mfu_counts_what_the_update_computes(monkeypatch, method, changes, passes):
    counts = Counter(used_row_tokens=1000, scored_tokens=100, teacher_tokens=1200, taught_tokens=80)
    counts = counts if passes[1] else Counter(used_row_tokens=1000, scored_tokens=100)
    run = SimpleNamespace(config=make_config(method, **changes), spec=QWEN)
    flops = passes[0] * usage.forward_flops(QWEN, 1000, 100) + passes[1] * usage.forward_flops(QWEN, 1200, 80)
    monkeypatch.setattr(usage, "peak_flops", lambda device: 1e15)
    metrics = update_metrics(run, counts, 4.0)
    assert metrics["update/tokens_per_s"] == 250
    assert metrics["update/mfu"] == pytest.approx(flops / (4.0 * 1e15 * jax.device_count()))


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
