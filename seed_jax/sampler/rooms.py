"""Slots by size: how many requests of which lengths are decoded together, and what memory that takes.

A room is a set of slots of the same number of cache columns. Acting needs many short slots, analysis a few long ones;
requests that find no free slot in their room wait (admission control), so the memory of the plan is all that is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from seed_jax.models.spec import ModelSpec

PIECE = 1024  # longest stretch of a prompt that is prefilled at once; its attention scores are [heads, 1024, columns]
STEPS = 8  # tokens a decode call adds at most: a request that ends in between leaves its slot empty for the rest
_SMALLEST = 64  # columns of the smallest room that is made on demand


class Room(NamedTuple):
    """slots: over all replicas of all hosts; prompt_tokens, reply_tokens: the most that a request may have; columns: of
    each slot's cache."""

    name: str
    slots: int
    prompt_tokens: int
    reply_tokens: int
    columns: int


def rooms_of(config) -> list[Room]:
    """The rooms of a run: for acting, and for the analysis of episodes if the policy does it itself."""
    rollout, hindsight = config.rollout, config.hindsight
    reads = hindsight.at_rollout or hindsight.at_eval != "no" or hindsight.second_attempts
    reads = reads or (config.eval.teacher_games and hindsight.source != "none")
    prompt = rollout.max_prompt_tokens + (hindsight.max_skill_tokens if reads else 0)
    rooms = [make_room("acting", rollout.batch, prompt, rollout.max_response_tokens, rollout.prompt_bucket)]
    if hindsight.source == "self_hindsight":
        slots, prompt, reply = rollout.analysis_batch, hindsight.max_analysis_tokens, hindsight.max_skill_tokens
        rooms.append(make_room("analysis", slots, prompt, reply, rollout.prompt_bucket))
    return rooms


def make_room(
    name: str, slots: int, prompt_tokens: int, reply_tokens: int, bucket: int = 32, steps: int = STEPS
) -> Room:
    """A room whose slots hold a padded prompt, and the reply with the steps that may be run beyond its end."""
    columns = max(_padded(prompt_tokens, bucket), prompt_tokens + reply_tokens + steps)
    return Room(name, slots, prompt_tokens, reply_tokens, -(-columns // 8) * 8)


def with_bucket(room: Room, bucket: int) -> Room:
    """The room, wide enough for prompts that are padded to another bucket than it was made for."""
    return room._replace(columns=max(room.columns, _padded(room.prompt_tokens, bucket)))


def fitting_room(rooms: Sequence[Room], prompt: int, reply: int) -> Room:
    """The smallest room for a request: it follows from the request alone. Raises ValueError if there is none."""
    fitting = [room for room in rooms if prompt <= room.prompt_tokens and reply <= room.reply_tokens]
    if not fitting:
        sizes = ", ".join(f"{r.name} {r.prompt_tokens} + {r.reply_tokens}" for r in rooms)
        raise ValueError(
            f"a prompt of {prompt} tokens with a budget of {reply} fits no room of the sampler ({sizes} tokens of "
            "prompt + reply); shorten it, or raise the limits that the rooms were made for"
        )
    return min(fitting, key=lambda room: room.columns)


def grown_room(prompt: int, reply: int, slots: int, bucket: int, steps: int) -> Room:
    """Without a plan: columns double until the request fits."""
    columns = _SMALLEST
    while columns < max(_padded(prompt, bucket), prompt + reply + steps):
        columns *= 2
    return Room(f"{columns} columns", slots, columns, columns, columns)


def pieces(tokens: int, bucket: int, columns: int) -> Iterator[tuple[int, int]]:
    """(padded size, window) of each prefill call for `tokens` tokens; see decode.prefill. All but the first piece are
    whole, and their windows double, so that few programs are compiled."""
    if tokens <= PIECE:
        if tokens:
            yield min(_padded(tokens, bucket), PIECE), 0
        return
    for offset in range(0, tokens, PIECE):
        window = PIECE if offset else 0
        while window < offset:
            window *= 2
        yield PIECE, min(window, columns)


def _padded(tokens: int, bucket: int) -> int:
    unit = bucket if tokens <= PIECE else PIECE
    return -(-tokens // unit) * unit


def bytes_a_column(spec: ModelSpec, dtype: Any) -> int:
    """Keys and values of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * jnp.dtype(dtype).itemsize


def check_plan(rooms: Sequence[Room], spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh]) -> None:
    """Raises ValueError if the caches alone exceed the memory of a device that tells its size (a CPU does not)."""
    statistics = meshes[0].devices.flat[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    tensor = meshes[0].shape["tensor"]
    shared = tensor if spec.num_kv_heads % tensor == 0 else 1
    slots = sum(-(-room.slots // len(meshes)) * room.columns for room in rooms)
    needed = slots * bytes_a_column(spec, dtype) // shared
    if limit is not None and needed > limit:
        raise ValueError(
            f"the sampler's cache needs {needed / 1e9:.1f} GB on each device, which has {limit / 1e9:.1f} GB; lower "
            "rollout.batch or rollout.analysis_batch, or the lengths in rollout and hindsight"
        )


def plan_text(rooms: Sequence[Room], spec: ModelSpec, dtype: Any, replicas: int) -> str:
    """What the rooms take on this host, a line a room."""
    lines, total = [], 0
    for room in rooms:
        slots = -(-room.slots // replicas) * replicas
        size = slots * room.columns * bytes_a_column(spec, dtype)
        total += size
        lines.append(
            f"  {room.name:<10}{slots:>5} slots of {room.columns:>6} columns ({room.prompt_tokens} + "
            f"{room.reply_tokens} tokens){size / 1e9:>9.3f} GB"
        )
    where = f"{replicas} replica{'s' if replicas > 1 else ''} of the model"
    return "\n".join([f"sampler: key-value cache of {total / 1e9:.3f} GB on this host, {where}", *lines])
