"""Value and gradient of the policy loss compile for real TPU slices, with libtpu on a host without a TPU.

In a process of its own: libtpu is loaded once a process, and must not see the eight virtual devices of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seed_jax import aot

ROOT = Path(__file__).resolve().parents[2]

# The head layout of Qwen2.5 and Llama at toy depth: GQA, head size 128 and 64, a vocabulary that is split.
PROGRAM = """
import json, sys
from seed_jax import aot
from seed_jax.models.spec import ModelSpec

topology, tensor, head_dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
spec = ModelSpec(
    vocab_size=2**15 + 128, d_model=512, num_layers=8, num_heads=512 // head_dim, num_kv_heads=2, head_dim=head_dim,
    d_ff=1024,
)
mesh = aot.topology_mesh(topology, tensor=tensor)
report = aot.compile_report(spec, mesh, aot.Workload(rows=8, row_tokens=1024, scored_tokens=128, head_tokens=256))
print(json.dumps({"devices": mesh.size, "kind": mesh.devices.flat[0].device_kind, **report._asdict()}))
"""


def compile_for(*arguments: object) -> dict:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
@pytest.mark.parametrize(
    ("topology", "devices", "kind", "tensor", "head_dim"),
    [("v5e:2x4", 8, "v5 lite", 1, 128), ("v5p:2x2x1", 4, "v5", 2, 128), ("v6e:2x2", 4, "v6 lite", 1, 64)],
    ids=["v5e", "v5p", "v6e"],
)
def test_policy_gradient_compiles(topology, devices, kind, tensor, head_dim):
    report = compile_for(topology, tensor, head_dim)
    assert report["devices"] == devices and kind in report["kind"]
    # Parameters are 63 MB in bfloat16. A device holds its share of them, and of their gradients.
    assert 63e6 / devices < report["argument_bytes"] < 1.2 * 63e6 / devices + 1e6
    assert 63e6 / devices < report["output_bytes"] < 1.2 * 63e6 / devices + 1e6
    # Eight layers of kept inputs for this device's rows, and room for one layer.
    assert report["temp_bytes"] < 200e6


def test_without_libtpu_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(aot.TopologyError, match=r"libtpu is not installed; pip install -r requirements-tpu-check\.txt"):
        aot.topology_mesh("v5e:2x2")
