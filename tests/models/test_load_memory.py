"""Loading holds little more in host memory than the parameters, and a host reads only what its own devices hold."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from seed_jax.models import hf, tensor_files
from seed_jax.models.spec import ModelSpec, init_params, iterate, weights
from tests import xla

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# The shapes of Qwen2.5-0.5B.
HALF_BILLION = ModelSpec(
    vocab_size=151936, d_model=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, d_ff=4864, rope_theta=1e6
)
MEASURE = """
import json, sys
from pathlib import Path
import jax, numpy as np
from seed_jax.models import hf
from seed_jax.sharding import make_mesh

def memory(field):  # bytes; the peak of this program alone, where that of getrusage may be the parent's
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

directory, dtype, devices = sys.argv[1:]
mesh = make_mesh(fsdp=4, tensor=2) if devices == "8" else None
jax.block_until_ready(jax.numpy.zeros(8))
before = memory("VmRSS")
_, params = hf.load(directory, mesh, dtype)
peak = memory("VmHWM") - before
corners = {"embed": params["embed"][-1, -1], **{f"{k} {n}": v[n].ravel()[-1] for k, v in params["layers"].items()
                                               for n in (0, 23)}}
print(json.dumps({"peak": peak, "size": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
                  "corners": {name: float(value) for name, value in corners.items()}}))
"""
TWO_HOSTS = """
import json, sys
import jax, numpy as np, safetensors.numpy

directory, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, number)
from seed_jax.models import hf, tensor_files
from seed_jax.models.spec import map_weights
from seed_jax.sharding import make_mesh

read, elements = tensor_files.read, []

def counting(*arguments):
    tensor = read(*arguments)
    elements.append(tensor.size)
    return tensor

tensor_files.read = counting
spec, params = hf.load(directory, make_mesh(fsdp=2, tensor=4))
stored = safetensors.numpy.load_file(directory + "/model.safetensors")

def owned(weight, leaf):
    layers = range(leaf.shape[0]) if weight.stacked else [None]
    whole = [weight.from_hf(stored[weight.hf_name.format(layer=layer)]) for layer in layers]
    whole = np.stack(whole) if weight.stacked else whole[0]
    assert len(leaf.addressable_shards) == 4 and not leaf.is_fully_addressable
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    return sum({str(shard.index): shard.data.size for shard in leaf.addressable_shards}.values())

mine = sum(jax.tree.leaves(map_weights(owned, spec, params)))
print(json.dumps({"read": sum(elements), "owned": mine, "all": spec.num_params}))
"""


def python(script: str, *arguments: object, devices: int) -> subprocess.Popen:
    variables = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla.flags(devices),
    }  # fmt: skip
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen) -> dict:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def filling(name: str) -> float:
    """A number of its own for each tensor, exact in bfloat16."""
    return (zlib.crc32(name.encode()) % 256) / 64


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("half_billion")
    shapes = {name: weight.hf_shape for _, weight in iterate(weights(HALF_BILLION)) for name in hf._hf_names(weight)}
    tensor_files.write(
        directory,
        {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()},
        lambda name: np.full(shapes[name], filling(name), ml_dtypes.bfloat16),
        400 * 10**6,
    )
    tensor_files.write_json(directory / "config.json", HALF_BILLION.to_hf())
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize(("dtype", "devices"), [("float32", 1), ("bfloat16", 8)])
def test_peak_memory_of_half_a_billion_parameters(half_billion, dtype, devices):
    measured = result(python(MEASURE, half_billion, dtype, devices, devices=devices))
    assert measured["size"] == HALF_BILLION.num_params * (4 if dtype == "float32" else 2)
    ratio = measured["peak"] / measured["size"]
    print(f"{dtype} on {devices} devices: peak {ratio:.2f} times the parameters")
    assert 0.9 < ratio < 1.4
    names = {path.split("/")[-1]: weight.hf_name for path, weight in iterate(weights(HALF_BILLION))}
    for corner, value in measured["corners"].items():
        name, _, layer = corner.partition(" ")
        assert value == filling(names[name].format(layer=layer)), corner


def test_two_hosts_read_their_own_slices(tmp_path):
    spec = ModelSpec(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=48)
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32),
        jax.eval_shape(lambda: init_params(spec, jax.random.key(0))),
    )
    hf.save(params, spec, tmp_path / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [python(TWO_HOSTS, tmp_path / "model", port, number, devices=4) for number in range(2)]
    for measured in map(result, processes):
        assert measured["read"] == measured["owned"]
        assert 0.5 <= measured["read"] / measured["all"] < 0.55  # what is not split over the hosts: biases, QKV's
