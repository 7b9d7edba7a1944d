"""Exports the policy of a checkpoint, which is only read, as a Hugging Face directory for transformers and vLLM.

python -m launch.export_hf --checkpoint=WORKDIR --out=DIR [--step=N] [--dtype=bfloat16] [--max_shard_gb=5]

It runs on the CPU, so it can be used while a run holds the accelerators. Its memory, measured with 0.5 B parameters (2
GB in float32) and shards of 0.5 GB: 4.6 GB at most for a float32 export, 4.1 GB for bfloat16.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import jax
from absl import app, flags

from seed_jax.models import hf
from seed_jax.runtime.checkpoint import CheckpointError
from seed_jax.runtime.logging import WorkdirError
from seed_jax.train.export import export_checkpoint

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "workdir of a run, or its directory checkpoints")
_STEP = flags.DEFINE_integer("step", None, "iteration to export; default: the newest checkpoint", lower_bound=0)
_OUT = flags.DEFINE_string("out", None, "directory to write; it may exist only if it is empty or an earlier export")
_DTYPE = flags.DEFINE_enum("dtype", "float32", list(hf.EXPORT_DTYPES), "type of the stored weights")
_MAX_SHARD_GB = flags.DEFINE_float(
    "max_shard_gb", hf.MAX_SHARD_BYTES / 1e9, "largest weight file in GB (10^9 bytes)", lower_bound=1e-6
)
_BASE_MODEL = flags.DEFINE_string(
    "base_model", None, "where the base model of the run is now (tokenizer and config); default: where it was"
)


def main(_) -> int:
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns that a read-only directory is read-only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left beside --out
    out = Path(_OUT.value).expanduser().resolve()
    try:
        done = export_checkpoint(
            Path(_CHECKPOINT.value).expanduser(),
            out,
            step=_STEP.value,
            dtype=_DTYPE.value,
            max_shard_bytes=int(_MAX_SHARD_GB.value * 1e9),
            base_model=_BASE_MODEL.value,
        )
    except (OSError, ValueError, CheckpointError, WorkdirError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    files = sorted(out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / 1e9
    print(
        f"exported iteration {done.iteration} ({done.num_params:,} parameters, {_DTYPE.value}, {size:.3g} GB in "
        f"{len(files)} file{'s' * (len(files) > 1)}) to {out}"
    )
    return 0


def run() -> None:
    flags.mark_flags_as_required(["checkpoint", "out"])
    app.run(main)


if __name__ == "__main__":
    run()
