"""The vision tower of Qwen2.5-VL (arXiv 2502.13923, section 2.1) as pure functions of a parameter tree.

An image is cut into cells of merge x merge patches, row by row; the patches of a cell stand side by side. Most layers
attend inside square windows, some over the whole image. `transformers` sorts the patches by windows for that and back
at the end; here they stay in place: windows end at every few rows of cells, so that such a band of rows is a run of
patches, and attention inside a band needs only a mask.

Glossary: N images, P patches of an image, n = P / merge^2 cells, H heads, hd head dim, D width of the tower.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax.models import attention as attention_lib
from seed_jax.models import vision_weights
from seed_jax.models.layers import REMAT_POLICIES, UNROLL_UP_TO, Rope, check_remat, project, rms_norm, rotate
from seed_jax.models.spec import ModelSpec
from seed_jax.models.vision_spec import MEAN, STD, VisionSpec

_EPS = 1e-6  # of every norm in the tower
_THETA = 10_000.0  # base of its rotary embedding


def features(
    params: dict[str, Any],
    spec: ModelSpec,
    images: jax.Array,
    dtype: Any = None,
    mesh: Mesh | None = None,
    remat: str = "none",
) -> jax.Array:
    """What the language model sees of images: uint8 [N, height, width, 3] -> [N, n, spec.d_model].

    The sides are multiples of a cell (images.fit); cells are in row-major order.
    params: a tree with the subtree "vision" of the weight table; dtype: compute dtype, default that of the parameters
    mesh, remat: as in `transformer.hidden_states`, the images taking the place of the rows
    """
    check_remat(remat)
    vision, params = spec.vision, params["vision"]
    height, width = images.shape[1:3]
    if height % vision.cell or width % vision.cell:
        raise ValueError(f"an image of {height} x {width} pixels is not of fitted size: multiples of {vision.cell}")
    grid, table = vision.grid(height, width), vision_weights.weights(vision, spec.d_model)
    dtype = params["patch"].dtype if dtype is None else dtype
    rope = rope_table(vision, grid)

    def layer_step(x: jax.Array, step: tuple[dict[str, jax.Array], jax.Array]) -> tuple[jax.Array, None]:
        layer, full = step
        layer = sharding.gather_layer(layer, table["layers"], mesh, x.dtype)
        return sharding.constrain(_layer(layer, vision, x, rope, grid, full), mesh, "fsdp"), None

    if remat != "none":
        layer_step = jax.checkpoint(layer_step, policy=REMAT_POLICIES[remat], prevent_cse=False)
    full = np.isin(np.arange(vision.depth), vision.full_layers)
    patch = sharding.gather_layer({"patch": params["patch"]}, {"patch": table["patch"]}, mesh, dtype)["patch"]
    # Without the barrier libtpu compiles the cut and the product as one, which takes it 100 s instead of 6.
    pixels = jax.lax.optimization_barrier(patches(images, vision))
    x = sharding.constrain(_embed(patch, pixels, dtype), mesh, "fsdp")
    x, _ = jax.lax.scan(layer_step, x, (params["layers"], full), unroll=vision.depth <= UNROLL_UP_TO)
    merged = _merge(sharding.gather_layer(params["merger"], table["merger"], mesh, dtype), vision, x)
    return sharding.constrain(merged, mesh, "fsdp")


def patches(images: jax.Array, vision: VisionSpec) -> jax.Array:
    """uint8 [N, height, width, 3] -> normalized float32 [N, P, patch, patch, 3]: column, row and colour of a pixel."""
    count, height, width, _ = images.shape
    rows, columns = vision.grid(height, width)
    cut = images.reshape(count, rows, vision.merge, vision.patch, columns, vision.merge, vision.patch, 3)
    cut = cut.transpose(0, 1, 4, 2, 5, 6, 3, 7).reshape(count, -1, vision.patch, vision.patch, 3)
    return (cut.astype(jnp.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)


def rope_table(vision: VisionSpec, grid: tuple[int, int]) -> Rope:
    """Cosines and sines [P, hd/2], float32: half of the pairs turn by the row of a patch, half by its column."""
    merge = vision.merge
    row, column = np.mgrid[: grid[0] * merge, : grid[1] * merge]
    places = np.stack([row, column], axis=-1).reshape(grid[0], merge, grid[1], merge, 2)
    places = places.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    pairs = vision.head_dim // 4
    angles = places[:, :, None] * (_THETA ** -(np.arange(pairs) / pairs))
    angles = angles.reshape(len(places), -1).astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _embed(patch: jax.Array, pixels: jax.Array, dtype: Any) -> jax.Array:
    """Patches [N, P, patch, patch, 3] -> [N, P, D]. Every frame of a patch holds the image, so their weights add up."""
    weight = patch.astype(dtype).sum(axis=2, dtype=jnp.float32).astype(dtype)
    return project(pixels.astype(dtype).reshape(*pixels.shape[:2], -1), weight.reshape(-1, weight.shape[-1]))


def _layer(
    layer: dict[str, jax.Array], vision: VisionSpec, x: jax.Array, rope: Rope, grid: tuple[int, int], full: jax.Array
) -> jax.Array:
    """One layer of the tower: x [N, P, D] -> [N, P, D]; full: [] bool, whether it attends over the whole image."""

    def linear(x: jax.Array, name: str, contracted: int = 1) -> jax.Array:
        return project(x, layer[name], contracted) + layer[f"{name}_bias"].astype(x.dtype)

    q, k, v = jnp.moveaxis(linear(rms_norm(x, layer["attn_norm"], _EPS), "qkv"), 2, 0)
    q, k = rotate(q, rope), rotate(k, rope)
    attended = jax.lax.cond(full, _attend_image, lambda *qkv: _attend_windows(*qkv, vision, grid), q, k, v)
    x = x + linear(attended, "o", contracted=2)
    hidden = rms_norm(x, layer["mlp_norm"], _EPS)
    return x + linear(jax.nn.silu(linear(hidden, "gate")) * linear(hidden, "up"), "down")


def _attend_image(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention_lib.bidirectional(q, k, v, jnp.ones((1, q.shape[1]), jnp.int32))


def _attend_windows(q: jax.Array, k: jax.Array, v: jax.Array, vision: VisionSpec, grid: tuple[int, int]) -> jax.Array:
    """Attention inside the windows: q, k, v [N, P, H, hd] -> [N, P, H, hd]. The last band may have fewer rows."""
    side, (rows, columns) = min(vision.window // vision.cell, grid[0]), grid
    bands, per_cell = -(-rows // side), vision.merge**2
    size = side * columns * per_cell
    padding = bands * size - q.shape[1]
    segments = np.arange(columns) // (vision.window // vision.cell) + 1
    segments = np.repeat(np.tile(segments, rows), per_cell)
    segments = np.pad(segments, (0, padding)).reshape(bands, size).astype(np.int32)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(-1, bands, size, *x.shape[2:])

    attend = jax.vmap(attention_lib.bidirectional, in_axes=(1, 1, 1, 0), out_axes=1)
    attended = attend(cut(q), cut(k), cut(v), jnp.asarray(segments)[:, None])
    return attended.reshape(len(q), -1, *q.shape[2:])[:, : q.shape[1]]


def _merge(merger: dict[str, jax.Array], vision: VisionSpec, x: jax.Array) -> jax.Array:
    """Patches [N, P, D] -> one vector of the language model for each cell, [N, n, D of the text]."""
    x = rms_norm(x, merger["norm"], _EPS).reshape(len(x), -1, vision.merge**2, vision.d_model)
    hidden = project(x, merger["in"], contracted=2) + merger["in_bias"].astype(x.dtype)
    hidden = jax.nn.gelu(hidden, approximate=False)
    return project(hidden, merger["out"]) + merger["out_bias"].astype(x.dtype)
