"""One program on many hosts: every process runs this code with its own devices, and a few calls meet in the middle.

A host plays its own share of the tasks, with its own environments and its own sampler, at its own pace. Only these
calls and the jitted programs over the whole mesh (update, reshard, checksums) are of all hosts: each host must come to
them in the same order. With one process they do nothing, and cost nothing.

What is decided here must not depend on the host: random keys follow the number of the episode in the whole batch, so
the number of hosts does not change what is played.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax.runtime import alive
from seed_jax.runtime.alive import leads, many
from seed_jax.runtime.logging import jsonable
from seed_jax.runtime.signals import Interrupted
from seed_jax.types import Episode, Skill, Turn

_SMALLEST_MESSAGE = 1 << 12  # bytes; longer ones are padded to a power of two, so that few programs are compiled


class HostError(RuntimeError):
    """The hosts cannot go on together; the message says which one is different and in what."""


# -- start and end -----------------------------------------------------------------------------------------------------


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    found: bool = False,
    timeout_s: float = 100.0,
) -> bool:
    """Joins the other processes of the job; returns whether there are others. Call before anything touches a device.

    coordinator, processes, process: "host:port" of process 0, how many there are, and which this is; they default to
        $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES and $JAX_PROCESS_ID.
    found: nothing is named, the cluster's own variables say it (Slurm, MPI, GKE). On Cloud TPU that is the default.
    timeout_s: a host that is not heard of for so long is given up, and with it the run (`alive.watching`); the start
        waits for the others three times as long.
    Raises HostError for values that do not fit together.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("JAX_NUM_PROCESSES") if processes is None else processes
    process = _number("JAX_PROCESS_ID") if process is None else process
    named = [coordinator is not None, processes is not None, process is not None]
    if any(named) and not all(named):
        raise HostError(
            f"of coordinator = {coordinator!r}, processes = {processes!r}, process = {process!r} either all must be "
            "given or none; with none and --distributed the cluster's own variables are read"
        )
    if all(named) and not 0 <= process < processes:
        raise HostError(f"process = {process} must be at least 0 and below processes = {processes}")
    if not (all(named) or found or _on_cloud_tpu()):
        if jax.process_count() > 1:  # the TPU knows
            raise HostError(f"this is one of {jax.process_count()} hosts of a TPU slice; add --distributed on each")
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # between the CPUs of several processes
    # Ours comes first and says what is lost; that of JAX ends a process that cannot say anything any more.
    settings = {"heartbeat_timeout_seconds": int(timeout_s) + 20, "shutdown_timeout_seconds": int(timeout_s)}
    try:
        jax.distributed.initialize(
            coordinator, processes, process, initialization_timeout=int(3 * timeout_s), **settings
        )
    except ValueError as error:
        raise HostError(f"the other hosts are not known ({error}); name coordinator and processes") from error
    # JAX has taken over SIGTERM; until the run handles it (runtime/signals.py) it shall end the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not many():
        return False
    alive.leave_last_words()
    return True


def _on_cloud_tpu() -> bool:
    try:  # how JAX finds it out has no public name
        from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster
    except ImportError:
        return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return GceTpuCluster.is_env_present() or GkeTpuCluster.is_env_present()


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdigit():
        raise HostError(f"${variable} = {text!r} must be a whole number")
    return int(text)


def leave(code: int) -> int:
    """The exit code of a process that failed. If there are others, it ends here: on the usual way out JAX would wait
    for them, and they may wait for us."""
    if many():
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(3 * alive.LOOK_EVERY_S * leads())  # the others read what happened from process 0
        alive.take_last_words_back()
        os._exit(code)
    return code


# -- meeting points ----------------------------------------------------------------------------------------------------


def share(count: int) -> slice:
    """Which of `count` things in order are of this host: contiguous parts, as equal as possible."""
    hosts, here = jax.process_count(), jax.process_index()
    return slice(count * here // hosts, count * (here + 1) // hosts)


def agree_max(numbers: Sequence[int]) -> list[int]:
    """The largest of each number over the hosts."""
    if not many():
        return [int(number) for number in numbers]
    return multihost_utils.process_allgather(np.asarray(numbers, np.int32)).max(axis=0).tolist()


def agree_any(flag: bool) -> bool:
    return bool(agree_max([flag])[0])


def gather_json(value: Any) -> list[Any]:
    """Values of JSON, one of each host, in the order of the processes; every host gets all."""
    if not many():
        return [value]
    message = np.frombuffer(json.dumps(jsonable(value)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.zeros(max(_SMALLEST_MESSAGE, 1 << (int(lengths.max()) - 1).bit_length()), np.uint8)
    padded[: len(message)] = message
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def sum_counters(counts: Counter) -> Counter:
    """Sums over the hosts; of seconds (names that end with "_s") the largest, since hosts work at the same time."""
    if not many():
        return counts
    total: Counter = Counter()
    for other in gather_json(dict(counts)):
        for name, value in other.items():
            total[name] = max(total[name], value) if name.endswith("_s") else total[name] + value
    return total


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` returns on process 0 (a value of JSON); the others do not call it. An error there is one of all."""
    if not many():
        return make()
    answer, failure = None, None
    if leads():
        try:
            answer = {"value": make()}
        except Exception as error:
            answer, failure = {"error": str(error)}, error
    first = gather_json(answer)[0]
    if failure:
        raise failure
    if "error" in first:
        raise HostError(f"process 0: {first['error']}")
    return first["value"]


def require_same(what: str, value: Any) -> None:
    """Raises HostError on every host unless all have the same value of JSON."""
    values = gather_json(value)
    different = [process for process, other in enumerate(values) if other != values[0]]
    if different:
        raise HostError(
            f"{what} of process {different[0]} differs from that of process 0 ({values[different[0]]!r}, not "
            f"{values[0]!r}); all hosts need the same command, the same code and the same files"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A phase that each host works through at its own pace. All wait at its end; if one was interrupted, all are."""
    interrupted = False
    try:
        yield
    except Interrupted:
        interrupted = True
    if agree_any(interrupted):
        raise Interrupted


# -- episodes and rows -------------------------------------------------------------------------------------------------


def gather_episodes(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """What metrics and evaluations need of the episodes of all hosts, in the order of their numbers.

    Of turns only whether they were valid and admissible, and how long the reply was; of skills only whether there is
    one. With one process: the episodes themselves.
    """
    if not many():
        return episodes
    outlines = [outline for part in gather_json([_outline(episode) for episode in episodes]) for outline in part]
    return [_episode(outline) for outline in sorted(outlines, key=lambda outline: outline["index"])]


_OUTLINED = ("task_id", "family", "group", "index", "reward", "won", "measures", "error", "skill_error", "attempt_of")


def _outline(episode: Episode) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in _OUTLINED} | {
        "skill": episode.skill is not None,
        "given": episode.given is not None,
        "turns": [(turn.valid, turn.admissible, len(turn.response_ids)) for turn in episode.turns],
    }


def _episode(outline: dict[str, Any]) -> Episode:
    blank = Turn("", [], [], np.zeros(0), "", "", None, True, True)
    turns = [
        dataclasses.replace(blank, valid=valid, admissible=admissible, response_ids=[0] * length)
        for valid, admissible, length in outline["turns"]
    ]
    skills = {name: Skill("", "") if outline[name] else None for name in ("skill", "given")}
    return Episode(goal="", **{name: outline[name] for name in _OUTLINED}, **skills, turns=turns)


def check_rows(mesh: Mesh) -> None:
    """Raises HostError unless every host has rows of the mesh for itself, and as many as the others: its part of every
    micro-batch lives there."""
    owners = [{device.process_index for device in row} for row in mesh.devices]
    torn = [number for number, owner in enumerate(owners) if len(owner) > 1]
    if torn:
        raise HostError(
            f"mesh.tensor = {mesh.shape['tensor']} puts row {torn[0]} of the mesh on several hosts; rows of a batch "
            "belong to one host, so lower mesh.tensor"
        )
    rows = Counter(process for owner in owners for process in owner)
    if len(set(rows.values())) > 1:
        raise HostError(f"the hosts have different numbers of devices, rows of the mesh by process: {dict(rows)}")


def join_rows(batch: Any, mesh: Mesh, rows_per_micro: int, micros_per_mini: int) -> Any:
    """The rows of all hosts as one batch of global arrays, split over "fsdp" like every batch.

    batch: a tree of NumPy arrays [M m r / hosts, ...] of this host's rows, of the same shapes on all hosts; scalars are
    the same on all. In the result [M m r, ...] every micro-batch holds as many rows of each host (M mini-batches, m
    micro-batches a mini-batch, r rows a micro-batch). With one process: the batch itself.
    """
    if not many():
        return batch
    place = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    rows = rows_per_micro // jax.process_count()

    def folded(x: np.ndarray) -> jax.Array:
        local = x.reshape(-1, micros_per_mini, rows, *x.shape[1:])
        shape = (*local.shape[:2], rows_per_micro, *local.shape[3:])
        return jax.make_array_from_process_local_data(place, local, shape)

    return jax.tree.map(lambda x: x if np.ndim(x) == 0 else _unfolded(mesh)(folded(x)), batch)


@functools.lru_cache(maxsize=8)
def _unfolded(mesh: Mesh) -> Any:
    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))
    return jax.jit(lambda x: x.reshape(-1, *x.shape[3:]), out_shardings=by_row)


def own_rows(array: jax.Array) -> np.ndarray:
    """The way back from `join_rows`: of an array [R, ...] whose rows are split over "fsdp", those of this host, in
    order. With one process: all."""
    if not many():
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}  # once for each "tensor"
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def on_first_host(params: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters as NumPy arrays on process 0, None on the others; stacked ones are fetched layer by layer."""

    def whole(leaf: jax.Array) -> np.ndarray | None:
        copy = _everywhere(leaf.sharding.mesh)(leaf)
        return np.asarray(copy.addressable_data(0)) if leads() else None

    def stacked(leaf: jax.Array) -> np.ndarray | None:
        layers = [whole(leaf[number]) for number in range(leaf.shape[0])]
        return np.stack(layers) if leads() else None

    host = {name: jax.tree.map(stacked if name == "layers" else whole, part) for name, part in params.items()}
    return host if leads() else None


@functools.lru_cache(maxsize=8)
def _everywhere(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
