"""What a run would need on a TPU slice, before there is one: its real programs, compiled on a host without a TPU.

`programs` lists the programs that a run of a config compiles on a slice: the update, the step of stage 1, the way of
the weights to the sampler, and the sampler's prefill and decode on one host, with images also what reads them. `check`
compiles one and reports memory, work and time at the chip's peak. See seed_jax/aot.py for what compiling without a TPU
needs.

A program's memory is what it reads (arguments), writes (output, without what reuses an argument) and needs meanwhile
(temp), and what else lies on the chip then (beside): the training state during a rollout, and the other room's cache.
During an update nothing does: the sampler has given its memory back.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seed_jax import aot, hlo, sharding
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler import aot as sampler_aot
from seed_jax.sampler import weights
from seed_jax.sampler.rooms import STEPS, Room, pieces, rooms_of, with_bucket
from seed_jax.train import factors, stage1
from seed_jax.train.packing import Shape, bucket, pack, pack_rows, shape_of
from seed_jax.train.state import TrainState, init_state, make_optimizer, state_shardings
from seed_jax.train.update import build_optimizer, build_update

NAMES = ("update", "sft", "reshard", "prefill", "decode", "prefill_analysis", "decode_analysis")
SEEING = ("features", "features_analysis")  # the vision tower on the images of one request, where there are images
# The sampler's programs with a paged cache and the ragged attention kernel: on request, since no run uses them yet.
PAGED = ("prefill_paged", "decode_paged", "prefill_analysis_paged", "decode_analysis_paged")
ALL = (*NAMES, *SEEING, *PAGED)
ROWS_A_CHIP = 4  # rows of a micro-batch on a chip, at most, where the config's number cannot be split
# Tokens of an ALFWorld turn (measured: prompt 617; response 120 assumed), for the mini-batches of an iteration.
TURN_TOKENS = 740
_HOST_GRIDS = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4"}  # chips of a host
_PROMPT_BUCKET = 128  # what the sampler pads prompts to on a TPU, at least
_USED = re.compile(r"(?:Used |\()([\d.]+)([KMG])(?: of|\) exceeds available HBM)")  # in the compiler's refusal
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class CompileError(ValueError):
    """The compiler refuses a program for another reason than memory."""


class Plan(NamedTuple):
    """A config on a slice. settings: fields that had to change so that the rows can be split; minis: mini-batches of an
    iteration; state_bytes: of the training state, on one chip; image_size: as the model reads them, None for text."""

    config: Any
    spec: ModelSpec
    topology: str
    mesh: Mesh
    decode_mesh: Mesh
    settings: dict[str, int]
    minis: int
    state_bytes: float
    image_size: tuple[int, int] | None = None


class Program(NamedTuple):
    """lower() gives the program; rounds: of its loops whose bound is a run-time value; beside: bytes on the chip that
    it does not know of."""

    name: str
    lower: Callable[[], Any]
    rounds: int
    beside: float


class Report(NamedTuple):
    """Of one program on one chip. Bytes as said in the module; flops, bytes, collectives (bytes that arrive, by kind)
    and roofline_s of one run; bound: what roofline_s is the time of. A program that the compiler refuses for its memory
    has the total from the compiler's message as temp_bytes, and no work."""

    name: str
    args_bytes: float
    output_bytes: float
    temp_bytes: float
    beside_bytes: float
    hbm_bytes: float
    flops: float
    bytes: float
    collectives: dict[str, float]
    lower_s: float
    compile_s: float
    roofline_s: float
    bound: str

    @property
    def total_bytes(self) -> float:
        return self.args_bytes + self.output_bytes + self.temp_bytes + self.beside_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.hbm_bytes

    def as_json(self) -> dict[str, Any]:
        gb = lambda size: round(size / 1e9, 3)  # noqa: E731
        return {
            "args_gb": gb(self.args_bytes),
            "output_gb": gb(self.output_bytes),
            "temp_gb": gb(self.temp_bytes),
            "beside_gb": gb(self.beside_bytes),
            "total_gb": gb(self.total_bytes),
            "hbm_gb": gb(self.hbm_bytes),
            "fits": self.fits,
            "flops": self.flops,
            "bytes": self.bytes,
            "collective_bytes": sum(self.collectives.values()),
            "collectives": self.collectives,
            "roofline_s": float(f"{self.roofline_s:.3g}"),
            "bound": self.bound,
            "lower_s": round(self.lower_s, 1),
            "compile_s": round(self.compile_s, 1),
        }


# -- a config on a slice -----------------------------------------------------------------------------------------------


def plan(
    config, spec: ModelSpec, topology: str, rows_per_chip: int = 0, image_size: tuple[int, int] | None = None
) -> Plan:
    """Raises aot.TopologyError for a slice that is not known, ValueError for meshes that do not fit it.

    rows_per_chip: rows of a micro-batch on each chip; 0 takes the config's, or where they cannot be split over the
        chips as many as leave the mini-batch as it is, at most ROWS_A_CHIP.
    """
    mesh = aot.topology_mesh(topology, tensor=config.mesh.tensor, fsdp=config.mesh.fsdp)
    settings = split_rows(config, mesh.shape["fsdp"], rows_per_chip)
    config = config.copy_and_resolve_references()
    for field, value in settings.items():
        config.pack[field.removeprefix("pack.")] = value
    rows = config.rollout.tasks * config.rollout.group * config.env.max_steps * TURN_TOKENS / config.pack.row_tokens
    minis = max(1, math.ceil(rows / (config.pack.rows_per_micro * config.pack.micros_per_mini)))
    decode_mesh = weights.decode_mesh(mesh, config.mesh.decode_tensor)
    made = Plan(config, spec, topology, mesh, decode_mesh, settings, minis, 0.0, image_size)
    return made._replace(state_bytes=chip_bytes(abstract_state(made)[0]))


def split_rows(config, fsdp: int, rows_per_chip: int = 0) -> dict[str, int]:
    """{field: value} of pack.rows_per_micro and pack.micros_per_mini if they must change for `fsdp` parts."""
    rows, micros = config.pack.rows_per_micro, config.pack.micros_per_mini
    mini = rows * micros
    if rows_per_chip:
        rows = rows_per_chip * fsdp
    elif rows % fsdp:
        fitting = [n * fsdp for n in range(1, ROWS_A_CHIP + 1) if mini % (n * fsdp) == 0]
        rows = max(fitting, default=fsdp)
    else:
        return {}
    return {"pack.rows_per_micro": rows, "pack.micros_per_mini": max(1, mini // rows)}


def chip_bytes(tree: Any) -> float:
    """Bytes of a tree of shapes with shardings on one device."""
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _float32_params(spec: ModelSpec) -> Any:
    return spec_lib.map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.float32), spec)


def _abstract(plan: Plan, optimizer, **keep: Any) -> tuple[TrainState, TrainState]:
    params = _float32_params(plan.spec)
    kept = {name: value for name, value in keep.items() if name != "reference_dtype"}
    places = sharding.param_shardings(plan.spec, plan.mesh, "train")
    places = state_shardings(optimizer, params, places, plan.mesh, **kept)
    return _placed(jax.eval_shape(lambda p: init_state(p, optimizer, **keep), params), places), places


def abstract_state(plan: Plan) -> tuple[TrainState, TrainState]:
    """(shapes with places, places) of the training state of the config's method."""
    choices = factors.choices(plan.config)
    return _abstract(
        plan,
        build_optimizer(plan.config),
        keep_reference=choices.needs_reference,
        keep_teacher=choices.keeps_teacher,
        reference_dtype=plan.config.model.dtype,
    )


# -- its programs ------------------------------------------------------------------------------------------------------


def programs(plan: Plan) -> list[Program]:
    """All programs that a run of the config compiles, in the order of NAMES, then those of SEEING and PAGED."""
    made = [
        Program("update", functools.partial(lower_update, plan), plan.minis, 0.0),
        Program("sft", functools.partial(lower_sft, plan), _sft_micros(plan), 0.0),
        Program("reshard", functools.partial(lower_reshard, plan), 1, _beside_reshard(plan)),
    ]
    return made + _sampler_programs(plan) + _seeing_programs(plan) + _sampler_programs(plan, paged=True)


def lower_update(plan: Plan):
    """The update on a batch of the packed rows of an iteration, as train/packing.py allocates them."""
    config = plan.config
    state, places = abstract_state(plan)
    p, taught = config.pack, factors.choices(config).needs_teacher
    shape = shape_of(p, plan.image_size, plan.spec.vision)
    per_mini = p.rows_per_micro * p.micros_per_mini
    one = pack([], shape, per_mini, taught)  # an empty mini-batch has every array of a batch
    if config.distill.span != "all":
        one = one.replace(span=one.mask)
    minis = bucket(plan.minis, 1)
    split, whole = sharding.batch_sharding(plan.mesh), sharding.replicated(plan.mesh)

    def widen(x) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] * minis, *x.shape[1:]) if np.ndim(x) else ()
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split if shape else whole)

    numbers = {name: jax.ShapeDtypeStruct((), jnp.float32, sharding=whole) for name in factors.numbers(config, 1, None)}
    update = build_update(config, plan.spec, plan.mesh, places)
    with jax.set_mesh(plan.mesh):
        return update.lower(state, jax.tree.map(widen, one), numbers)


def sft_rows(plan: Plan) -> int:
    rows, fsdp = plan.config.sft.rows_per_micro, plan.mesh.shape["fsdp"]
    return rows if rows and rows % fsdp == 0 else fsdp


def _sft_micros(plan: Plan) -> int:
    return max(1, -(-plan.config.sft.batch // sft_rows(plan)))


def lower_sft(plan: Plan):
    """One optimizer step of stage 1: sft.batch examples, at worst one a row."""
    s = plan.config.sft
    optimizer = make_optimizer(s.b1, s.b2, s.eps, s.weight_decay, s.grad_clip)
    state, places = _abstract(plan, optimizer, keep_reference=False)
    step, _ = stage1.build_programs(plan.config, plan.spec, plan.mesh, optimizer, places)
    whole = sharding.replicated(plan.mesh)
    lead = (_sft_micros(plan), sft_rows(plan))
    shape = Shape(s.row_tokens, s.scored_tokens_per_row, 1)
    if plan.image_size:
        images = _analysis_images(plan.config)
        shape = shape._replace(images=images, image_size=plan.image_size, vision=plan.spec.vision)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype, sharding=whole), pack_rows([[]], shape)[0]
    )
    shares = jax.ShapeDtypeStruct((*lead, s.scored_tokens_per_row), jnp.float32, sharding=whole)
    numbers = [jax.ShapeDtypeStruct((), dtype, sharding=whole) for dtype in (jnp.int32, jnp.float32)]
    with jax.set_mesh(plan.mesh):
        return step.lower(state, rows, shares, *numbers)


def lower_reshard(plan: Plan):
    """Training weights to the sampler's. Where a run would cast and move in two steps, because decoding has the devices
    in another order, this is both in one with the order of training: the same bytes cross the network."""
    ordered = Mesh(
        plan.mesh.devices.reshape(plan.decode_mesh.devices.shape),
        plan.mesh.axis_names,
        axis_types=plan.mesh.axis_types,
    )
    params = _placed(_float32_params(plan.spec), sharding.param_shardings(plan.spec, plan.mesh, "train"))
    with jax.set_mesh(ordered):
        return weights.program(plan.spec, ordered, jnp.dtype(plan.config.model.dtype)).lower(params)


def _beside_reshard(plan: Plan) -> float:
    """The rest of the training state, and the copy that is cast before it moves."""
    params = _placed(_float32_params(plan.spec), sharding.param_shardings(plan.spec, plan.mesh, "train"))
    cast = plan.spec.num_params * jnp.dtype(plan.config.model.dtype).itemsize / plan.mesh.size
    return plan.state_bytes - chip_bytes(params) + cast


def _sampler_programs(plan: Plan, paged: bool = False) -> list[Program]:
    """Of one replica on one host, with the longest prompt that the config allows."""
    dtype = jnp.dtype(plan.config.model.dtype)
    replica, rooms = replica_mesh(plan), replica_rooms(plan)
    cache = {room: chip_bytes(sampler_aot.abstract_cache(plan.spec, replica, room, dtype)) for room in rooms}
    made = []
    for room in rooms:
        beside = plan.state_bytes + sum(cache.values()) - cache[room]
        bucket_tokens = max(_PROMPT_BUCKET, plan.config.rollout.prompt_bucket)
        size, window = max(pieces(room.prompt_tokens - 1, bucket_tokens, room.columns), key=lambda piece: piece[::-1])
        ending = ("" if room.name == "acting" else f"_{room.name}") + ("_paged" if paged else "")
        common = (plan.spec, replica, room, dtype)
        pictures = (_room_images(plan, room), plan.image_size) if plan.image_size else ()
        if paged:
            prefill = functools.partial(sampler_aot.lower_paged, "prefill", *common, size, window)
            decoding = functools.partial(sampler_aot.lower_paged, "decode", *common, size)
        else:
            prefill = functools.partial(sampler_aot.lower_prefill, *common, size, window, *pictures)
            decoding = functools.partial(sampler_aot.lower_decode, *common)
        made += [
            Program(f"prefill{ending}", prefill, 1, beside),
            Program(f"decode{ending}", decoding, STEPS, beside),
        ]
    return made


def _seeing_programs(plan: Plan) -> list[Program]:
    """What makes features of the images of one request: of a turn, and of the longest episode."""
    if plan.image_size is None:
        return []
    dtype, replica, rooms = jnp.dtype(plan.config.model.dtype), replica_mesh(plan), replica_rooms(plan)
    caches = sum(chip_bytes(sampler_aot.abstract_cache(plan.spec, replica, room, dtype)) for room in rooms)
    return [
        Program(
            "features" if room.name == "acting" else f"features_{room.name}",
            functools.partial(
                sampler_aot.lower_features, plan.spec, replica, dtype, _room_images(plan, room), plan.image_size
            ),
            1,
            plan.state_bytes + caches,
        )
        for room in rooms
    ]


def _analysis_images(config) -> int:
    """The most images of an analysis: one a step."""
    return config.env.max_steps * (1 + (config.hindsight.source == "group_reflection"))


def _room_images(plan: Plan, room: Room) -> int:
    """Images of the largest request of a room, as the sampler pads them."""
    return 1 if room.name == "acting" else bucket(_analysis_images(plan.config), 1)


def replica_mesh(plan: Plan) -> Mesh:
    """The chips of one copy of the model, on a host by itself: part of a larger slice cannot be compiled for alone."""
    kind, first = plan.topology.partition(":")[0], plan.mesh.devices.flat[0].process_index
    chips = sum(device.process_index == first for device in plan.mesh.devices.flat)
    host = f"{kind}:{_HOST_GRIDS[chips]}" + ("x1" if kind == "v5p" else "")
    mesh = aot.topology_mesh(host, tensor=plan.decode_mesh.shape["tensor"])
    return Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)


def replica_rooms(plan: Plan) -> list[Room]:
    """The rooms of the config with one replica's share of their slots, which are those of all hosts together."""
    replicas = plan.decode_mesh.shape["fsdp"]
    bucket_tokens = max(_PROMPT_BUCKET, plan.config.rollout.prompt_bucket)
    rooms = [with_bucket(room, bucket_tokens) for room in rooms_of(plan.config)]
    return [room._replace(slots=-(-room.slots // replicas)) for room in rooms]


# -- compiling ---------------------------------------------------------------------------------------------------------


def check(program: Program, chip: aot.Chip) -> Report:
    """Compiles one program. What is too large for the chip's memory gives a report that does not fit."""
    start = time.perf_counter()
    lowered = program.lower()
    middle = time.perf_counter()
    try:
        compiled, text = aot.compile_with_text(lowered)
    except jax.errors.JaxRuntimeError as error:
        used = _USED.search(str(error))
        if used is None:
            reason = str(error).strip().splitlines()[0][:300]
            raise CompileError(f"{program.name} does not compile for this slice: {reason}") from error
        refused = float(used[1]) * _UNITS[used[2]]
        return Report(
            program.name, 0.0, 0.0, refused, program.beside, chip.hbm_bytes, 0.0, 0.0, {}, middle - start,
            time.perf_counter() - middle, 0.0, "memory",
        )  # fmt: skip
    compile_s = time.perf_counter() - middle
    memory, cost = compiled.memory_analysis(), hlo.cost(text, program.rounds)
    times = {
        "compute": cost.flops / chip.flops,
        "HBM": cost.bytes / chip.hbm_bytes_s,
        "network": sum(cost.collectives.values()) / chip.network_bytes_s,
    }
    bound = max(times, key=times.get)
    return Report(
        program.name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        program.beside,
        chip.hbm_bytes,
        cost.flops,
        cost.bytes,
        cost.collectives,
        middle - start,
        compile_s,
        times[bound],
        bound,
    )
