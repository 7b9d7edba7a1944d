"""Speed and memory of the model core, against something in the same run.

    python -m benchmarks.model              # all parts, as text
    python -m benchmarks.model --json       # the same as one JSON object
    python -m benchmarks.model --parts=cpu

compile  Compiles, without a TPU, value and gradient of a clipped policy loss of Qwen2.5-3B for 16 chips (v5e:4x4): full
         remat, splash attention, bfloat16 parameters, gradients placed like them. Reports temporary memory of one chip
         and seconds. Each case runs in a process of its own. Needs libtpu (requirements-tpu-check.txt).
cpu      Forward and backward of an 8-layer model of width 512 on this host's CPU, float32: packed rows here against
         padded sequences in transformers (torch), the same weights, the same ragged batch, interleaved repetitions.
         Counted are real tokens a second. Needs torch (requirements-test.txt).

What cannot be measured here is reported with its reason. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

PARTS = ("compile", "cpu")
JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of text")
PARTS_FLAG = flags.DEFINE_list("parts", list(PARTS), f"what to measure: {', '.join(PARTS)}")
REPETITIONS = flags.DEFINE_integer("repetitions", 5, "cpu: timed repetitions of each side; the median counts")
SEQUENCES = flags.DEFINE_integer("sequences", 12, "cpu: sequences in the ragged batch")
CASE = flags.DEFINE_integer("compile_case", None, "compile only the case of this index, in this process")

TOPOLOGY = "v5e:4x4"


class Case(NamedTuple):
    """Rows, tokens and scored tokens of a row; targets: temporary gigabytes of a chip, seconds to compile."""

    rows: int
    row_tokens: int
    scored_tokens: int
    target_gb: float
    target_s: float | None


CASES = (Case(16, 2560, 512, 1.1, 30.0), Case(64, 4096, 1024, 5.0, None))

# A batch as agents make it: prompts of many lengths, the response is a sixth (it is 16 % in ALFWorld).
MIN_TOKENS, MAX_TOKENS, MEDIAN_TOKENS, SPREAD, RESPONSE_SHARE = 60, 700, 240, 0.6, 0.16
ROW_TOKENS, VOCAB = 704, 8192
CPU_TARGET_RATIO = 1.3


def compile_case(case: Case) -> dict[str, Any]:
    """Compiles one case in this process."""
    from seed_jax import aot
    from seed_jax.models import published

    work = aot.Workload(case.rows, case.row_tokens, case.scored_tokens)
    report = aot.compile_report(published.spec("qwen2.5-3b"), aot.topology_mesh(TOPOLOGY), work)
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in report._asdict().items()}


def compile_part() -> list[dict[str, Any]]:
    """One record a case, each from a process of its own: a second compilation would profit from the first."""
    from seed_jax import aot

    problem = aot.missing()
    if problem is not None:
        return [{"skipped": problem}]
    records = []
    for index, case in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.model", f"--compile_case={index}"]
        done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        record = {"model": "Qwen2.5-3B", "topology": TOPOLOGY, **case._asdict()}
        if done.returncode:
            records.append({**record, "failed": done.stderr.strip().splitlines()[-1:]})
            continue
        report = json.loads(done.stdout.strip().splitlines()[-1])
        temp_gb, seconds = report["temp_bytes"] / 1e9, report["lower_s"] + report["compile_s"]
        met = temp_gb <= case.target_gb and (case.target_s is None or seconds <= case.target_s)
        records.append({**record, **report, "temp_gb": round(temp_gb, 3), "seconds": round(seconds, 1), "met": met})
    return records


class Ragged(NamedTuple):
    """Sequences of token ids, and how many tokens at the end of each are scored."""

    sequences: list[np.ndarray]
    responses: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


def ragged_batch(count: int) -> Ragged:
    """Log-normal lengths, cut to MIN_TOKENS .. MAX_TOKENS; the same batch every time."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, count), MIN_TOKENS, MAX_TOKENS).astype(int)
    return Ragged(
        [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths],
        [max(8, round(RESPONSE_SHARE * length)) for length in lengths],
    )


def cpu_spec() -> Any:
    from seed_jax.models.spec import ModelSpec

    return ModelSpec(
        vocab_size=VOCAB, d_model=512, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64, d_ff=1408,
        max_position=1024,
    )  # fmt: skip


def packed_side(params: Any, spec: Any, batch: Ragged):
    """() -> sum of the scored log-probs, after a gradient step's forward and backward on packed rows."""
    import jax
    import jax.numpy as jnp

    from seed_jax.models.logprobs import scored_logprobs
    from seed_jax.train.packing import Sample, Shape, first_fit, pack_rows

    samples = [Sample(ids[:-n], ids[-n:]) for ids, n in zip(batch.sequences, batch.responses, strict=True)]
    shape = Shape(ROW_TOKENS, round(ROW_TOKENS * RESPONSE_SHARE) + 32, turns=ROW_TOKENS // MIN_TOKENS)
    groups = [[samples[i] for i in row] for row in first_fit(samples, shape)]
    rows = jax.device_put(pack_rows(groups, shape)[0])

    @jax.jit
    @jax.value_and_grad
    def step(params, rows):
        logp, _ = scored_logprobs(params, spec, rows.tokens, rows.segments, rows.positions, rows.targets, remat="dots")
        return jnp.sum(logp)

    def run() -> float:
        return float(jax.block_until_ready(step(params, rows))[0])

    return run, {"rows": len(groups), "row_tokens": ROW_TOKENS, "remat": "dots"}


def padded_sides(directory: str, batch: Ragged):
    """The same sum with transformers, right-padded: with its own loss over all logits, and with the response's only."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").train()
    width = max(map(len, batch.sequences))
    ids, mask, labels = torch.zeros((3, len(batch.sequences), width), dtype=torch.long)
    for i, (sequence, response) in enumerate(zip(batch.sequences, batch.responses, strict=True)):
        n = len(sequence)
        ids[i, :n], mask[i, :n] = torch.tensor(sequence, dtype=torch.long), 1
        labels[i] = -100
        labels[i, n - response : n] = ids[i, n - response : n]
    count = sum(batch.responses)

    def whole() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss * count
        loss.backward()
        return -float(loss.detach())

    def response_only() -> float:
        model.zero_grad(set_to_none=True)
        hidden = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        scored = labels[:, 1:] != -100
        logits = model.lm_head(hidden[scored])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][scored], reduction="sum")
        loss.backward()
        return -float(loss.detach())

    return whole, response_only, {"sequences": len(batch.sequences), "width": width}


def cpu_part(sequences: int, repetitions: int) -> dict[str, Any]:
    """Interleaved repetitions of the three sides; the first of each, which compiles or warms up, does not count."""
    for package in ("torch", "transformers"):
        try:
            __import__(package)
        except ImportError:
            return {"skipped": f"{package} is not installed; pip install -r requirements-test.txt"}
    import jax

    from seed_jax.models import hf
    from seed_jax.models.spec import init_params
    from seed_jax.runtime.host import keep_freed_memory

    keep_freed_memory()
    # One device: at this width XLA uses all cores for it, and two devices are slower (469 to 720 tokens/s, two cores).
    batch, spec = ragged_batch(sequences), cpu_spec()
    params = jax.jit(init_params, static_argnums=0)(spec, jax.random.key(0))
    with tempfile.TemporaryDirectory() as directory:
        hf.save(params, spec, directory + "/model")
        whole, response_only, padded = padded_sides(directory + "/model", batch)
    ours, packed = packed_side(params, spec, batch)
    sides = {"packed": ours, "padded": whole, "padded_response_logits": response_only}
    sums = {name: side() for name, side in sides.items()}
    if max(sums.values()) - min(sums.values()) > 1e-4 * abs(sums["padded"]):
        raise RuntimeError(f"the sides do not compute the same sum of log-probabilities: {sums}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        for name, side in sides.items():
            time.sleep(0.5)  # the other library's threads spin for a moment after their last task
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    speed = {name: batch.tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = speed["packed"] / speed["padded"]
    return {
        "batch": {"sequences": sequences, "tokens": batch.tokens, "scored": sum(batch.responses)},
        "packed": packed,
        "padded": padded,
        "tokens_per_s": {name: round(value) for name, value in speed.items()},
        "seconds": {name: [round(value, 3) for value in times] for name, times in seconds.items()},
        "sum_of_logprobs": {name: round(value, 3) for name, value in sums.items()},
        "ratio": round(ratio, 2),
        "ratio_response_logits": round(speed["packed"] / speed["padded_response_logits"], 2),
        "target_ratio": CPU_TARGET_RATIO,
        "met": ratio >= CPU_TARGET_RATIO,
    }


def describe(result: dict[str, Any]) -> str:
    lines = []
    for record in result.get("compile", []):
        if "skipped" in record:
            lines.append(f"compile: skipped, {record['skipped']}")
            continue
        name = f"{record['rows']} rows x {record['row_tokens']} tokens, {record['scored_tokens']} scored a row"
        if "failed" in record:
            lines.append(f"compile {name}: FAILED, {' '.join(record['failed'])}")
            continue
        limit_s = "" if record["target_s"] is None else f" (target {record['target_s']:.0f})"
        lines.append(
            f"compile {record['model']} for {record['topology']}, {name}: {record['temp_gb']:.3f} GB temporary memory "
            f"a chip (target {record['target_gb']}), {record['seconds']:.1f} s{limit_s}"
        )
    cpu = result.get("cpu")
    if cpu is not None and "skipped" in cpu:
        lines.append(f"cpu: skipped, {cpu['skipped']}")
    elif cpu is not None:
        speed, batch = cpu["tokens_per_s"], cpu["batch"]
        lines += [
            f"cpu, forward + backward of {batch['tokens']} tokens in {batch['sequences']} sequences, "
            f"{batch['scored']} of them scored:",
            f"  packed into {cpu['packed']['rows']} rows of {cpu['packed']['row_tokens']}: {speed['packed']} tokens/s",
            f"  transformers, padded to {cpu['padded']['width']}: {speed['padded']} tokens/s; "
            f"with logits of responses only: {speed['padded_response_logits']} tokens/s",
            f"  ratio {cpu['ratio']} (target {cpu['target_ratio']}); {cpu['ratio_response_logits']} against the latter",
        ]
    return "\n".join(lines)


def main(_: list[str]) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported
    if CASE.value is not None:
        print(json.dumps(compile_case(CASES[CASE.value])))
        return
    unknown = set(PARTS_FLAG.value) - set(PARTS)
    if unknown:
        raise app.UsageError(f"--parts={','.join(sorted(unknown))} is not known; use some of {', '.join(PARTS)}")
    result: dict[str, Any] = {}
    if "compile" in PARTS_FLAG.value:
        result["compile"] = compile_part()
    if "cpu" in PARTS_FLAG.value:
        result["cpu"] = cpu_part(SEQUENCES.value, REPETITIONS.value)
    print(json.dumps(result, indent=2) if JSON.value else describe(result))


if __name__ == "__main__":
    app.run(main)
