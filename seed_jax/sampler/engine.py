"""Continuous batching: requests enter slots as these become free, and their completions come as they finish.

    handle = sampler.submit(prompt_ids, SamplingParams(64), sampler.key((iteration, episode, turn)))
    for handle, completion in sampler.step(): ...

A reply depends on its own prompt, parameters and key only; what else is decoded decides how fast it comes, not what it
says (see decode.py). Every request that was accepted gives exactly one completion.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler import decode as programs_lib
from seed_jax.sampler import stops, weights
from seed_jax.sampler.requests import Bank, Request, check, look
from seed_jax.sampler.rooms import (
    STEPS,
    Room,
    check_plan,
    fitting_room,
    grown_room,
    pieces,
    plan_text,
    rooms_of,
    with_bucket,
)
from seed_jax.sampler.sampling import request_key, uniforms
from seed_jax.types import Completion, SamplingParams

PREFILL_TOKENS = 256  # tokens of one prefill call, if the prompts are short enough for several in one
MAX_QUEUE = 1 << 16


class QueueFull(RuntimeError):
    """More requests wait than the sampler was told to hold."""


class Sampler:
    """Decodes requests with the current weights.

    eos_id: the token, or tokens, that end a reply
    batch: slots, over all replicas of all hosts; prompt_bucket: prompts are padded to multiples of this many tokens
    mesh: each of its rows that belongs to this host holds a replica of the model, which decodes on its own
    rooms: slots by size, see rooms.py; a request that fits none is refused. None: rooms are made as requests need them
    text: decodes token ids, for stop texts; dtype: of weights and cache (default: that of the parameters)
    Counters in `stats`: requests, completions, images, prompt_tokens, prefill_tokens (with padding), new_tokens,
    length_stops, aborted, slot_steps (steps of the decode programs times slots; new_tokens / slot_steps is the
    occupancy).
    """

    def __init__(
        self,
        spec: ModelSpec,
        eos_id: int | Sequence[int],
        *,
        seed: int,
        batch: int = 64,
        prompt_bucket: int = 32,
        mesh: Mesh | None = None,
        rooms: Sequence[Room] | None = None,
        text: Callable[[Sequence[int]], str] | None = None,
        dtype: Any = None,
        steps: int = STEPS,
        max_queue: int = MAX_QUEUE,
    ):
        self.spec, self.seed, self.steps, self.max_queue = spec, seed, steps, max_queue
        self.stop_ids = (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        self.mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), sharding.MESH_AXES) if mesh is None else mesh
        self.meshes = weights.local_meshes(self.mesh)
        tpu = self.mesh.devices.flat[0].platform == "tpu"
        # The TPU's attention kernel for prompts takes multiples of 128 tokens.
        self.bucket = -(-prompt_bucket // 128) * 128 if tpu else prompt_bucket
        self.rooms = None if rooms is None else [with_bucket(room, self.bucket) for room in rooms]
        self.batch, self.text, self.dtype = batch, text, dtype
        self.programs = [
            programs_lib.programs(spec, mesh, self.stop_ids, "splash" if tpu else "dense") for mesh in self.meshes
        ]
        self.weights: list[Any] | None = None
        self.stats: Counter = Counter()
        self._next_handle = 0
        self._live: dict[int, Request] = {}
        self._queues: dict[Room, deque[Request]] = {}
        self._banks: dict[Room, list[Bank]] = {}
        self._ready: list[tuple[int, Completion]] = []

    def load(self, params: dict[str, Any]) -> None:
        """Takes over the weights, of any layout on the mesh. All requests must have been answered."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are under way; new weights would tear their replies apart")
        dtype = params["embed"].dtype if self.dtype is None else jnp.dtype(self.dtype)
        self.weights = None  # the old copy may go before the new one comes
        loaded = weights.load(params, self.spec, self.mesh, dtype)
        self.weights = jax.block_until_ready(weights.local_view(loaded, self.meshes))

    def release(self) -> None:
        """Gives the memory of weights and caches back, for an update; `load` comes before the next request.

        All requests must have been answered. Qwen2.5-3B on a v5e chip: 6.2 GB of weights (one chip a copy) and 2.7 GB
        of cache, beside an update that needs 8 of its 16 GB.
        """
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are under way; they need the weights and the cache")
        self.weights = None
        self._banks = {}

    def plan(self) -> str:
        """The rooms and their memory, as text. Raises ValueError if they do not fit a device (where that is known)."""
        dtype = jnp.float32 if self.dtype is None else self.dtype
        here = [room._replace(slots=self._slots(room) * len(self.meshes)) for room in self.rooms or ()]
        check_plan(here, self.spec, dtype, self.meshes)
        return plan_text(here, self.spec, dtype, len(self.meshes))

    def _slots(self, room: Room) -> int:
        """Slots of a room on each replica: the same for any number of hosts, and so are the compiled programs."""
        return -(-room.slots // self.mesh.shape["fsdp"])

    def key(self, path: Sequence[int], seed: int | None = None) -> np.ndarray:
        """The random key of the request (stream, episode, turn) under `seed` (default: the sampler's)."""
        return request_key(self.seed if seed is None else seed, *path)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, key: np.ndarray, images: Sequence[np.ndarray] = ()
    ) -> int:
        """Accepts a request and returns its handle. Raises ValueError for one that cannot be answered, QueueFull.

        images: those of the prompt, in the order of their places
        """
        if self.weights is None:
            raise RuntimeError("the sampler has no weights yet: call sampler.load(params)")
        check(prompt, params, self.spec.vocab_size, self.text)
        seen, shift = look(prompt, images, self.spec)
        waiting = sum(map(len, self._queues.values()))
        if waiting >= self.max_queue:
            raise QueueFull(f"{waiting} requests wait for a slot, max_queue = {self.max_queue}; call step() first")
        if self.rooms is None:
            room = grown_room(len(prompt), params.max_tokens, self.batch, self.bucket, self.steps)
        else:
            room = fitting_room(self.rooms, len(prompt), params.max_tokens)
        draws = uniforms(key, params.max_tokens + self.steps)
        request = Request(self._next_handle, list(prompt), params, draws, room, seen, shift)
        self._next_handle += 1
        self._live[request.handle] = request
        self._queues.setdefault(room, deque()).append(request)
        self.stats["requests"] += 1
        self.stats["prompt_tokens"] += len(prompt)
        self.stats["images"] += len(images)
        return request.handle

    def abort(self, handle: int) -> None:
        """Ends a request; its completion, with the tokens so far, comes with the next step. Unknown: KeyError."""
        request = self._live[handle]
        if request.place is None:
            self._queues[request.room].remove(request)
        self._finish(request, "aborted")

    def abort_all(self) -> None:
        """Drops every request and every completion that was not taken yet."""
        for handle in list(self._live):
            self.abort(handle)
        self._ready = []

    @property
    def pending(self) -> int:
        """Requests whose completion has not been returned yet."""
        return len(self._live) + len(self._ready)

    def step(self) -> list[tuple[int, Completion]]:
        """Fills free slots from the queues, decodes up to `steps` tokens in all of them -> what has finished."""
        self._admit()
        running = [(bank, self._dispatch(bank)) for banks in self._banks.values() for bank in banks if bank.busy]
        for bank, out in running:
            self._collect(bank, *map(np.asarray, out))
        ready, self._ready = self._ready, []
        assert self.stats["requests"] == self.stats["completions"] + len(self._live), "requests in != completions out"
        return ready

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        paths: Sequence[tuple[int, int, int]],
        *,
        seed: int | None = None,
        images: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[Completion]:
        """All at once: one completion a prompt, in order. paths: (stream, episode, turn) of each, see `key`; images:
        those of each prompt."""
        shown = [()] * len(prompts) if images is None else images
        done: dict[int, Completion] = {}
        others, handles, waiting = [], [], deque(zip(prompts, paths, shown, strict=True))
        while waiting or len(done) < len(handles):
            while waiting and sum(map(len, self._queues.values())) < self.max_queue:
                prompt, path, seen = waiting.popleft()
                handles.append(self.submit(prompt, params, self.key(path, seed), seen))
            mine = set(handles)
            for handle, completion in self.step():
                if handle in mine:
                    done[handle] = completion
                else:
                    others.append((handle, completion))
        self._ready += others
        return [done[handle] for handle in handles]

    # -- one round -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Places waiting requests, each on the replica with the most free slots, and prefills them."""
        for room, queue in self._queues.items():
            if not queue:
                continue
            banks = self._banks.get(room) or self._open(room)
            free = [bank.free[::-1] for bank in banks]
            placed: list[list[Request]] = [[] for _ in banks]
            while queue and any(free):
                number = max(range(len(banks)), key=lambda n: len(free[n]))
                request = queue.popleft()
                banks[number].enter(request, free[number].pop())
                placed[number].append(request)
            for bank, requests in zip(banks, placed, strict=True):
                self._prefill(bank, requests)

    def _open(self, room: Room) -> list[Bank]:
        share = room._replace(slots=self._slots(room))
        dtype = self.weights[0]["embed"].dtype
        self._banks[room] = [
            Bank(
                share,
                programs_lib.empty_cache_program(self.spec, mesh, share.slots, room.columns, dtype)(),
                replica,
                programs_lib.int_columns(self.spec),
            )
            for replica, mesh in enumerate(self.meshes)
        ]
        return self._banks[room]

    def _prefill(self, bank: Bank, requests: list[Request]) -> None:
        """Pieces of equal shape go together, up to PREFILL_TOKENS tokens in a call; its rows are always filled up. A
        prompt with images has a call of its own."""
        groups: dict[tuple[int, int, int], list[Request]] = {}
        for request in requests:
            if request.seen is not None:
                self._prefill_seen(bank, request)
                continue
            for number, (size, window) in enumerate(pieces(len(request.prompt) - 1, self.bucket, bank.room.columns)):
                groups.setdefault((number, size, window), []).append(request)
        for (number, size, window), members in sorted(groups.items(), key=lambda item: item[0]):
            rows = max(1, PREFILL_TOKENS // size)
            for start in range(0, len(members), rows):
                self._prefill_call(bank, members[start : start + rows], rows, number, size, window)

    def _prefill_seen(self, bank: Bank, request: Request) -> None:
        features = self.programs[bank.replica].features(self.weights[bank.replica], request.seen.images)
        for number, (size, window) in enumerate(pieces(len(request.prompt) - 1, self.bucket, bank.room.columns)):
            part = slice(number * size, min((number + 1) * size, len(request.prompt) - 1))
            index, positions = np.full((1, size), -1, np.int32), np.zeros((1, size, 3), np.int32)
            index[0, : part.stop - part.start] = request.seen.index[part]
            positions[0, : part.stop - part.start] = request.seen.positions[part]
            pictures = programs_lib.Pictures(features, index, positions)
            self._prefill_call(bank, [request], 1, number, size, window, pictures)
        request.seen = None

    def _prefill_call(self, bank: Bank, members, rows: int, number: int, size: int, window: int, *pictures) -> None:
        tokens, slots, offsets = np.zeros((rows, size), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, request in enumerate(members):
            piece = request.prompt[number * size : min((number + 1) * size, len(request.prompt) - 1)]
            tokens[row, : len(piece)] = piece
            slots[row], offsets[row] = request.place[1], number * size
        self.stats["prefill_tokens"] += rows * size
        bank.cache = self.programs[bank.replica].prefill(
            self.weights[bank.replica],
            bank.cache,
            tokens,
            slots,
            offsets,
            np.int32(len(members)),
            *pictures,
            window=window,
        )

    def _dispatch(self, bank: Bank):
        draws = np.zeros((bank.room.slots, self.steps, 2), np.float32)
        for slot, request in enumerate(bank.requests):
            if request is not None:
                draws[slot] = request.draws[len(request.tokens) : len(request.tokens) + self.steps]
        bank.cache, out = self.programs[bank.replica].decode(
            self.weights[bank.replica], bank.cache, bank.ints.copy(), bank.floats.copy(), draws
        )
        return out

    def _collect(self, bank: Bank, tokens, plain, sampled, counts) -> None:
        """Takes in what a decode call has written: tokens, log-probs [B, N], how many count [B]."""
        self.stats["slot_steps"] += int(counts.max()) * len(counts)
        for slot, request in enumerate(bank.requests):
            if request is None:
                continue
            count = int(counts[slot])
            request.tokens += tokens[slot, :count].tolist()
            request.logprobs.append(np.stack([plain[slot, :count], sampled[slot, :count]]))
            state = bank.ints[slot]
            state[0] = request.tokens[-1]
            state[1] += count
            state[2] -= count
            if finish := self._ended(request, count):
                self._finish(request, finish)

    def _ended(self, request: Request, new: int) -> str | None:
        params = request.params
        if params.stop or params.stop_json:
            stopped = request.tokens[-1] in self.stop_ids
            body = len(request.tokens) - stopped
            kept = stops.cut(self.text, request.tokens[:body], new - stopped, params) if new > stopped else None
            if kept is not None:
                del request.tokens[kept:]
                return "stop"
        if request.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(request.tokens) == params.max_tokens else None

    def _finish(self, request: Request, finish: str) -> None:
        if request.place is not None:
            bank, slot = request.place
            bank.leave(slot)
        del self._live[request.handle]
        self.stats["completions"] += 1
        self.stats["new_tokens"] += len(request.tokens)
        self.stats["length_stops"] += finish == "length"
        self.stats["aborted"] += finish == "aborted"
        self._ready.append((request.handle, request.completion(finish)))


def sampler_of(config, spec: ModelSpec, tokenizer, mesh: Mesh) -> Sampler:
    """The sampler of a run; its rooms hold the longest requests that the config allows."""
    return Sampler(
        spec,
        tokenizer.eos_token_id,
        seed=config.seed,
        prompt_bucket=config.rollout.prompt_bucket,
        mesh=weights.decode_mesh(mesh, config.mesh.decode_tensor),
        rooms=rooms_of(config),
        text=functools.partial(tok.decode, tokenizer),
        dtype=config.model.dtype,
    )
