"""What a run does with its devices: memory, model FLOPs against the chip's peak, programs compiled, profiler traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from seed_jax.models.spec import ModelSpec

# Dense bfloat16 FLOPs a second, by the start of `device_kind`, from the vendors' data sheets; the longest match counts.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p calls itself "TPU v5"
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
SLOW_COMPILE_S = 1.0  # a program compiled in the middle of a run is worth a warning from here on


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_gb() -> tuple[float, float] | None:
    """(GB in use now, most so far) on the fullest of this host's devices; None where devices do not tell (a CPU)."""
    told = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if not told:
        return None
    most = lambda name: max(stats.get(name, 0) for stats in told) / 1e9  # noqa: E731
    return most("bytes_in_use"), most("peak_bytes_in_use")


# -- arithmetic --------------------------------------------------------------------------------------------------------


def peak_flops(device: jax.Device) -> float | None:
    """FLOPs a second of one device at best; None if it is not known."""
    names = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def forward_flops(spec: ModelSpec, tokens: float, scored: float, seen: float = 0) -> float:
    """Of one forward pass over `tokens`, of which `scored` reach the vocabulary projection and `seen` stand for a cell
    of an image: 2 for each weight of a matrix (arXiv 2001.08361, section 2.1). Attention scores are left out: 2 % for
    turns of 740 tokens, Qwen2.5-3B."""
    width = spec.d_model
    heads = (
        2 * spec.num_heads * spec.head_dim + 2 * spec.num_kv_heads * spec.head_dim
    )  # query and output, key and value
    layer = width * heads + 3 * width * spec.d_ff
    cells = _cell_flops(spec) * seen if seen else 0.0
    return 2.0 * (spec.num_layers * layer * tokens + spec.vocab_size * width * scored) + cells


def _cell_flops(spec: ModelSpec) -> float:
    """Of the vision tower, for the patches of one cell and what joins them."""
    vision = spec.vision
    width, joined = vision.d_model, vision.merge**2 * vision.d_model
    layer = 4 * width**2 + 3 * width * vision.d_ff
    patch = vision.depth * layer + 3 * vision.patch**2 * width
    return 2.0 * (vision.merge**2 * patch + joined**2 + joined * spec.d_model)


# -- compilation -------------------------------------------------------------------------------------------------------


class Compilations:
    """Counts the programs that XLA compiles (or loads from its cache) while it is open, with their seconds."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self._new: list[tuple[str, float]] = []
        self._known: set[str] = set()

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, seconds: float, **details: str | int) -> None:
        if event == self.EVENT:
            self._new.append((str(details.get("fun_name", "a program")), seconds))

    def collect(self) -> tuple[dict[str, float], list[str]]:
        """(metrics, programs that took long although they were there before, for other shapes) since the last call."""
        new, self._new = self._new, []
        metrics = {"compile/programs": len(new), "compile/seconds": sum(seconds for _, seconds in new)}
        slow = [(name, seconds) for name, seconds in new if seconds >= SLOW_COMPILE_S]
        again = [f"{name} ({seconds:.1f} s)" for name, seconds in slow if name in self._known]
        self._known.update(name for name, _ in new)
        return metrics, again


# -- profile -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def profiled(directory: Path, wanted: bool) -> Iterator[None]:
    """A trace of everything inside, if wanted, for TensorBoard's profile plugin or Perfetto; one of each host."""
    if not wanted:
        yield
        return
    with jax.profiler.trace(str(directory)):
        yield
