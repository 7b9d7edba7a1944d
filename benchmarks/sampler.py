"""Speed of the sampler on this host's CPU: a random Qwen2-shaped model in float32, temperature 1.

    python -m benchmarks.sampler           # as text
    python -m benchmarks.sampler --json    # one JSON line a part

fixed    --batch prompts of --prompt/2 to --prompt tokens, --new tokens each.
agentic  128 requests with the same prompts, whose replies have log-normal lengths (mean 48, at most 256 tokens), on
         --batch slots. A static batch would wait for its longest reply.

Three rounds with other prompts each; the first, which compiles, is reported as `first`, the faster of the others
counts. `share` is the achieved part of a limit: all matrix products of the work at the speed that this machine reaches
for products of the same shapes, measured in the same run, and nothing else. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
from absl import app, flags

JSON = flags.DEFINE_bool("json", False, "print one JSON line a part instead of text")
BATCH = flags.DEFINE_integer("batch", 32, "requests decoded together")
PROMPT = flags.DEFINE_integer("prompt", 256, "longest prompt in tokens; the shortest has half as many")
NEW = flags.DEFINE_integer("new", 64, "tokens of each reply of the fixed work")
LAYERS = flags.DEFINE_integer("layers", 8, "layers of the model")
WIDTH = flags.DEFINE_integer("d", 512, "width of the model")
DEVICES = flags.DEFINE_integer("devices", 1, "JAX devices the CPU is split into; each decodes its share of the batch")
STEPS = flags.DEFINE_integer("steps", 8, "tokens a decode call adds at most")

VOCAB, HEADS, KV_HEADS, FFN = 32000, 8, 2, 1408
ROUNDS = 3
REQUESTS, MEAN_REPLY, MAX_REPLY, SPREAD = 128, 48, 256, 0.8


def model() -> Any:
    from seed_jax.models.spec import ModelSpec

    width = WIDTH.value
    return ModelSpec(
        vocab_size=VOCAB, d_model=width, num_layers=LAYERS.value, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=width // HEADS, d_ff=FFN, rope_theta=1e6,
    )  # fmt: skip


def reply_lengths(rng: np.random.Generator) -> np.ndarray:
    drawn = rng.lognormal(math.log(MEAN_REPLY) - SPREAD**2 / 2, SPREAD, REQUESTS)
    return np.clip(np.rint(drawn), 1, MAX_REPLY).astype(int)


def prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    lengths = rng.integers(PROMPT.value // 2, PROMPT.value, count)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def serve(sampler: Any, asked: list[list[int]], lengths: Any, stream: int) -> int:
    """Submits everything, waits for everything, returns the number of new tokens."""
    from seed_jax.types import SamplingParams

    for number, (prompt, length) in enumerate(zip(asked, lengths, strict=True)):
        sampler.submit(prompt, SamplingParams(int(length)), sampler.key((stream, number, 0)))
    tokens = 0
    while sampler.pending:
        tokens += sum(len(completion.tokens) for _, completion in sampler.step())
    assert tokens == sum(lengths)
    return tokens


def rounds(sampler: Any, part: str) -> dict[str, float]:
    """Seconds of each round; the prompts and lengths of a round are the same in every run of this program."""
    rng, times, rates = np.random.default_rng(0), [], []
    for number in range(ROUNDS):
        count = BATCH.value if part == "fixed" else REQUESTS
        asked = prompts(rng, count)
        lengths = np.full(count, NEW.value) if part == "fixed" else reply_lengths(rng)
        before = sampler.stats.copy()
        start = time.perf_counter()
        tokens = serve(sampler, asked, lengths, number)
        times.append(time.perf_counter() - start)
        rates.append(tokens / times[-1])
    used = {name: sampler.stats[name] - before[name] for name in ("slot_steps", "prefill_tokens", "new_tokens")}
    return {
        "part": part, "tok_s": max(rates[1:]), "wall": min(times[1:]), "first": times[0],
        "occupancy": used["new_tokens"] / used["slot_steps"], "prompt_tokens": sum(map(len, asked)), **used,
    }  # fmt: skip


def limit_seconds(spec: Any, record: dict[str, float]) -> float:
    """Time of the bare matrix products of the last round: prompts in one piece of 2048 rows, one row a request in
    decoding, each at the best rate of eight tries."""
    body = spec.num_params - spec.vocab_size * spec.d_model
    prefill = 2 * body * record["prompt_tokens"] / _matrix_rate(2048, spec.d_model, 2 * spec.d_ff)
    decode = 2 * spec.num_params * record["new_tokens"] / _matrix_rate(BATCH.value, spec.d_model, 2 * spec.d_ff)
    return prefill + decode


def _matrix_rate(rows: int, width: int, ffn: int) -> float:
    """Operations a second of [rows, width] @ [width, ffn] and back, over as many different weights as a model has."""
    import jax

    rng = np.random.default_rng(0)
    pairs = [
        [jax.numpy.asarray(rng.standard_normal(shape, np.float32) * 0.02) for shape in ((width, ffn), (ffn, width))]
        for _ in range(8)
    ]
    x = jax.numpy.asarray(rng.standard_normal((rows, width), np.float32))

    @jax.jit
    def chain(x, pairs):
        for up, down in pairs:
            x = x @ up @ down
        return x

    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(chain(x, pairs))
        seconds.append(time.perf_counter() - start)
    return 4 * len(pairs) * rows * width * ffn / min(seconds[1:])


def main(_) -> None:
    import jax

    from seed_jax import sharding
    from seed_jax.models.spec import init_params
    from seed_jax.runtime.host import keep_freed_memory
    from seed_jax.sampler.engine import Sampler
    from seed_jax.sampler.rooms import make_room

    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES.value)
    spec = model()
    params = jax.jit(init_params, static_argnums=0)(spec, jax.random.key(0))
    for part, reply in (("fixed", NEW.value), ("agentic", MAX_REPLY)):
        room = make_room(part, BATCH.value, PROMPT.value, reply, steps=STEPS.value)
        sampler = Sampler(spec, (), seed=0, rooms=[room], mesh=sharding.make_mesh(), steps=STEPS.value)
        sampler.load(params)
        record = rounds(sampler, part)
        record["share"] = limit_seconds(spec, record) / record["wall"]
        record = {name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()}
        if JSON.value:
            print(json.dumps(record), flush=True)
        else:
            print(
                f"{part:<9}{record['tok_s']:>8.0f} tokens/s in {record['wall']:.2f} s (first {record['first']:.1f} s), "
                f"{record['occupancy']:.0%} of the slots' steps used, {record['share']:.0%} of the matrix limit",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
