"""What a compiled program does on one chip, counted in its HLO text with every loop run as often as it says.

XLA's own cost analysis counts the body of a loop once: for a model whose layers are scanned that is one layer. Here the
number of rounds comes from the loop's condition; a loop whose bound is only known at run time (the mini-batches of the
update) runs as often as the caller says. FLOPs are those of matrix products, two a multiplication (a product with a
single row is none to the compiler), and of attention kernels. Bytes are what instructions read and write in HBM outside
fusions, an upper bound: on the chip values may stay in fast memory.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2,
    "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
# Opcodes that move no data of their own.
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "while", "conditional", "call", "copy-done", "async-update",
    "async-done", "all-gather-done", "all-reduce-done",
    "collective-permute-done", "slice-done", "send-done", "recv-done",
}  # fmt: skip


class Cost(NamedTuple):
    """Of one run on one chip. collectives: bytes that arrive at a chip, by kind of operation; unknown_loops: how many
    loops have a bound that the text does not tell."""

    flops: float
    bytes: float
    collectives: dict[str, float]
    unknown_loops: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    text: str


def cost(text: str, rounds_unknown: int = 1) -> Cost:
    """Counts a compiled program (`compiled.as_text()`). rounds_unknown: of loops whose bound is a run-time value."""
    computations, entry = _parse(text)
    counter = _Counter(computations, rounds_unknown)
    flops, moved, collectives = counter.of(entry)
    return Cost(flops, moved, dict(collectives), counter.unknown)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        header = _HEADER.match(line) if not line.startswith(" ") else None
        if header:
            current = computations.setdefault(header[1], [])
            entry = header[1] if line.startswith("ENTRY") else entry
        elif current is not None and (start := _INSTRUCTION.match(line)):
            rest = line[start.end() :]
            end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ") - 1
            shape, rest = rest[: end + 1], rest[end + 1 :].lstrip()
            open_at = rest.find("(")
            close = _closing(rest, open_at)
            current.append(
                _Instruction(
                    start[1], shape, rest[:open_at], re.findall(r"%([\w.\-]+)", rest[open_at:close]), rest[open_at:]
                )
            )
    return computations, entry


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text) - 1


def _sizes(shape: str) -> list[tuple[str, list[int], str]]:
    """(type, dimensions, layout) of every array in a shape."""
    return [
        (kind, [int(d) for d in dims.split(",") if d], layout or "")
        for kind, dims, layout in _ARRAY.findall(shape)
        if kind in _ITEM_BYTES
    ]


def _bytes(shape: str, hbm_only: bool = False) -> float:
    """Bytes of a shape; hbm_only leaves out what lies in a chip's own fast memory (layout S(1) and above)."""
    return sum(
        _ITEM_BYTES[kind] * math.prod(dims) for kind, dims, layout in _sizes(shape) if not (hbm_only and "S(" in layout)
    )


class _Counter:
    def __init__(self, computations: dict[str, list[_Instruction]], rounds_unknown: int):
        self.computations, self.rounds_unknown = computations, rounds_unknown
        self.known: dict[tuple[str, bool], tuple[float, float, dict[str, float]]] = {}
        self.channels: set[str] = set()
        self.unknown = 0

    def of(self, name: str, fused: bool = False) -> tuple[float, float, dict[str, float]]:
        """(FLOPs, bytes, collectives) of one run of a computation; inside a fusion nothing goes to HBM."""
        if (name, fused) in self.known:
            return self.known[name, fused]
        by_name = {i.name: i for i in self.computations[name]}
        flops, moved, collectives = 0.0, 0.0, defaultdict(float)
        for i in self.computations[name]:
            own = self._flops(i, by_name)
            kind = i.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                collectives[kind] += self._received(i, kind)
            flops += own
            if not fused and i.opcode not in _FREE:
                moved += self._moved(i, by_name)
            for child, times, inside in self._children(i, by_name):
                more = self.of(child, fused or inside)
                flops, moved = flops + times * more[0], moved + times * more[1]
                for kind, size in more[2].items():
                    collectives[kind] += times * size
        self.known[name, fused] = flops, moved, collectives
        return self.known[name, fused]

    def _children(self, i: _Instruction, by_name) -> list[tuple[str, float, bool]]:
        """(computation, how often, as part of a fusion) of what an instruction runs."""
        if i.opcode == "while":
            condition, body = _attribute(i, "condition"), _attribute(i, "body")
            times = self._rounds(i, condition, body, by_name)
            return [(body, times, False), (condition, times, False)]
        if i.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", i.text)
            names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
            names = names or re.findall(r"(?:true|false)_computation=%([\w.\-]+)", i.text)
            costs = [(self.of(name), name) for name in names]
            return [(max(costs, key=lambda c: (c[0][0], c[0][1]))[1], 1, False)] if costs else []
        if i.opcode in ("fusion", "call", "async-start"):
            called = _attribute(i, "calls") or _attribute(i, "to_apply")
            return [(called, 1, i.opcode == "fusion")] if called else []
        return []

    def _rounds(self, loop: _Instruction, condition: str, body: str, by_name) -> float:
        """Rounds of a loop that counts up, from and to a constant, in steps of a constant."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text)
        if known:
            return int(known[1])
        inside = {i.name: i for i in self.computations[condition]}
        compare = next((i for i in inside.values() if i.opcode == "compare" and "direction=LT" in i.text), None)
        limit = compare and self._constant(inside.get(compare.operands[1]), loop, by_name)
        if limit is None:
            self.unknown += 1
            return self.rounds_unknown
        counter = inside.get(compare.operands[0])
        start = self._constant(counter, loop, by_name) or 0
        return max(0, -(-(limit - start) // self._step(counter, body, loop, by_name)))

    def _step(self, counter: _Instruction | None, body: str, loop: _Instruction, by_name) -> int:
        """What a round adds to the counter; 1 where the text does not show it."""
        inside = {i.name: i for i in self.computations[body]}
        root = self.computations[body][-1]
        if counter is None or counter.opcode != "get-tuple-element" or root.opcode != "tuple":
            return 1
        new = inside.get(root.operands[_index(counter)])
        if new is None or new.opcode != "add":
            return 1
        steps = [self._constant(inside.get(name), loop, by_name) for name in new.operands]
        return next((step for step in reversed(steps) if step), 1)

    def _constant(self, i: _Instruction | None, loop: _Instruction, by_name) -> int | None:
        """The whole number that an instruction of the loop's condition or body has when the loop starts."""
        if i is not None and i.opcode == "get-tuple-element":
            carried = by_name.get(loop.operands[0])
            i = by_name.get(carried.operands[_index(i)]) if carried and carried.opcode == "tuple" else None
            while i is not None and i.opcode in ("copy", "bitcast"):
                i = by_name.get(i.operands[0])
        if i is None or i.opcode != "constant":
            return None
        value = re.match(r"\((-?\d+)\)", i.text)
        return int(value[1]) if value else None

    # -- one instruction -----------------------------------------------------------------------------------------------

    def _flops(self, i: _Instruction, by_name) -> float:
        shapes = [by_name[name].shape for name in i.operands if name in by_name]
        if i.opcode == "convolution":
            return _convolution_flops(i, shapes)
        if i.opcode == "dot":
            contracted = [int(d) for d in re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.text)[1].split(",") if d]
            left = _sizes(shapes[0])[0][1]
            return 2.0 * math.prod(_sizes(i.shape)[0][1]) * math.prod(left[d] for d in contracted)
        if i.opcode == "custom-call" and "tpu_custom_call" in i.text:
            return _kernel_flops(i.name, shapes)
        return 0.0

    def _received(self, i: _Instruction, kind: str) -> float:
        """Bytes that a collective brings to a chip. Pieces of one operation (it may be spread over fusions that compute
        meanwhile) share a channel and count once."""
        channel = re.search(r"channel_id=(\d+)", i.text)
        if channel:
            if channel[1] in self.channels:
                return 0.0
            self.channels.add(channel[1])
        arrays = _sizes(i.shape)
        if i.opcode == "collective-permute-start":
            arrays = arrays[1:2]
        elif i.opcode.endswith("-start"):
            arrays = arrays[len(arrays) // 2 :]
        size = sum(_ITEM_BYTES[t] * math.prod(dims) for t, dims, _ in arrays)
        group = _group_size(i.text)
        share = (group - 1) / group if group > 1 else 0.0
        if kind == "collective-permute":
            return size
        return size * {"all-reduce": 2 * share, "reduce-scatter": group - 1}.get(kind, share)

    def _moved(self, i: _Instruction, by_name) -> float:
        """Bytes that an instruction reads and writes in HBM."""
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * _bytes(i.shape)
        if i.opcode == "dynamic-update-slice":
            return 2 * _bytes(by_name[i.operands[1]].shape) if i.operands[1] in by_name else 0.0
        if i.opcode in ("copy-start", "slice-start"):
            return 2 * _bytes(_first_part(i.shape))
        operands = [by_name[name].shape for name in i.operands if name in by_name]
        called = _attribute(i, "calls") if i.opcode == "fusion" else None
        if called is None:
            return _bytes(i.shape, True) + sum(_bytes(shape, True) for shape in operands)
        return self._fusion_moved(i, called, operands)

    def _fusion_moved(self, i: _Instruction, called: str, operands: list[str]) -> float:
        """Of an operand that is only sliced the slices count, of a result that is only written in part that part."""
        body = self.computations[called]
        inside = {x.name: x for x in body}
        total, written_in_place = 0.0, 0.0
        for x in body:
            if x.opcode == "parameter":
                number = int(re.match(r"\((\d+)\)", x.text)[1])
                uses = [u for u in body if x.name in u.operands]
                if uses and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in uses):
                    total += sum(_bytes(u.shape, True) for u in uses)
                elif uses and all(u.opcode == "dynamic-update-slice" and u.operands[0] == x.name for u in uses):
                    written_in_place += sum(_bytes(u.shape, True) for u in uses)
                    total += sum(_bytes(inside[u.operands[1]].shape, True) for u in uses if u.operands[1] in inside)
                elif number < len(operands):
                    total += _bytes(operands[number], True)
        return total + max(_bytes(i.shape, True) - written_in_place, 0.0)


def _index(i: _Instruction) -> int:
    return int(re.search(r"index=(\d+)", i.text)[1])


def _attribute(i: _Instruction, name: str) -> str | None:
    found = re.search(rf"\b{name}=%([\w.\-]+)", i.text)
    return found[1] if found else None


def _first_part(shape: str) -> str:
    found = _ARRAY.search(shape)
    return found[0] if found else ""


def _group_size(text: str) -> int:
    """Chips of one group of a collective, in any of the three forms of replica_groups."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", named[2]))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    if counted:
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    return len(listed[1].split(",")) if listed else 1


def _convolution_flops(i: _Instruction, shapes: list[str]) -> float:
    """Multiplications that meet no padding; the TPU compiler writes every matrix product as a convolution."""
    inputs, kernel, output = (_sizes(shape)[0][1] for shape in (*shapes[:2], i.shape))
    left, right, result = re.search(r"dim_labels=([^_]+)_([^-]+)->(\w+)", i.text).groups()
    window = {name: [v for v in value.split("x")] for name, value in re.findall(r"(\w+)=([\dx_\-]+)", _window(i.text))}
    flops = 2.0 * output[result.index("b")] * output[result.index("f")] * kernel[right.index("i")]
    spatial = sorted(label for label in result if label.isdigit())
    for d, label in enumerate(spatial):
        at = lambda name, default, d=d: window[name][d] if name in window else default  # noqa: E731
        low = int(at("pad", "0_0").split("_")[0])
        stride, base, spread = (int(at(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        length, taps, places = inputs[left.index(label)], kernel[right.index(label)], output[result.index(label)]
        if places * taps > 1 << 22:
            flops *= places * taps  # a long convolution; padding hardly counts
            continue
        last = (length - 1) * base
        flops *= sum(
            1
            for place in range(places)
            for tap in range(taps)
            if 0 <= (at_input := place * stride + tap * spread - low) <= last and at_input % base == 0
        )
    return flops


def _window(text: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", text)
    return found[1] if found else ""


# Matrix products over all pairs of tokens in each of splash attention's kernels.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}


def _kernel_flops(name: str, shapes: list[str]) -> float:
    """Of an attention kernel, whose inside the text does not show: products over the causal half of all pairs.

    Operands 2 and 3 of the forward kernel are queries [B, H, T, hd] and keys [B, K, S, hd], and so are those of the
    others after their two tables.
    """
    products = next((n for kernel, n in _SPLASH_PRODUCTS.items() if name.startswith(kernel)), 0)
    arrays = [dims for shape in shapes for _, dims, _ in _sizes(shape) if len(dims) == 4]
    if not products or len(arrays) < 2:
        return 0.0
    batch, heads, queries, size = arrays[0]
    return products * 2.0 * batch * heads * size * queries * arrays[1][2] / 2
