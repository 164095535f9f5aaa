"""Kernels of a step, from a trace of PyTorch's profiler, and the time that each needs at least.

An operation has to move its tensors once and to compute its products once. Its floor is the longer of both
times at the rates of the device.
"""

from __future__ import annotations

import ast
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
ON_HOST = {"cpu_op", "user_annotation"}
BYTES = {"float": 4, "int": 4, "long int": 8, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}  # else 1
FORWARD, INPUT, WEIGHTS = "convolution, forward", "convolution, for its input", "convolution, for its weights"
SUMS, PRODUCTS, MAPS, VECTORS = "sums of BatchNorm", "matrix products", "feature maps", "vectors of weights"
COPIES, REST = "copies", "the rest"
KINDS = (FORWARD, INPUT, WEIGHTS, SUMS, PRODUCTS, MAPS, VECTORS, COPIES, REST)
WHOLE = {  # operations that consist of several; a kernel belongs to the outermost of them
    "aten::convolution": FORWARD,
    "fedhassle::convolve_relu": FORWARD,
    "aten::convolution_backward": "",  # both other kinds, told apart by the names of the kernels
    "fedhassle::moments": SUMS,
    "fedhassle::gradient_sums": SUMS,
    "aten::mm": PRODUCTS,
    "aten::addmm": PRODUCTS,
    "aten::bmm": PRODUCTS,
    "aten::copy_": COPIES,
    "aten::clone": COPIES,
}

WORDS = {  # in the names of kernels that no operation is known of
    "dgrad": INPUT,
    "wgrad": WEIGHTS,
    "fprop": FORWARD,
    "_sums": SUMS,
    "triton_": MAPS,
    "gemm": PRODUCTS,
    "nvjet": PRODUCTS,
    "Memcpy": COPIES,
    "Memset": COPIES,
}


class Rates(NamedTuple):
    """Rates of a device; the defaults are those of an H200."""

    bytes: float = 4.3e12  # per second
    flops: float = 750e12


class Work(NamedTuple):
    """What an operation has to move and to compute."""

    bytes: float
    flops: float = 0.0

    def floor(self, rates: Rates) -> float:
        """Microseconds that it takes at least."""
        return 1e6 * max(self.bytes / rates.bytes, self.flops / rates.flops)


class Operation(NamedTuple):
    """An operation on the host that launches kernels."""

    id: int
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()  # of its arguments; empty for one that is no tensor
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()  # of the arguments that are no tensors


class Launch(NamedTuple):
    """A kernel, with the operation that launches it."""

    kernel: str
    microseconds: float
    operation: Operation | None = None


class Part(NamedTuple):
    """Kernels of one operation, or of one direction of it."""

    kind: str
    label: str
    kernels: tuple[str, ...]
    microseconds: float
    work: Work | None  # None: unknown


# Work


def convolution(
    x: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], size: int = 2
) -> tuple[tuple[int, ...], Work]:
    """The size of the result of a convolution, and its work; each of its gradients has the same."""
    sides = [
        (side + 2 * edge - across) // step + 1
        for side, across, step, edge in zip(x[2:], kernel[2:], stride, padding, strict=True)
    ]
    z = (x[0], kernel[0], *sides)
    moved = size * (math.prod(x) + math.prod(kernel) + math.prod(z))
    return z, Work(moved, 2.0 * math.prod(z) * math.prod(kernel[1:]))


def work_of(operation: Operation, kind: str) -> Work | None:
    """The work of an operation; of one of its directions if it is a backward convolution."""
    name, sizes, values = operation.name, operation.sizes, operation.values
    size = BYTES.get(operation.types[0], 1) if operation.types else 1
    if name in ("aten::convolution", "fedhassle::convolve_relu"):
        at = 3 if name == "aten::convolution" else 4
        z, work = convolution(sizes[0], sizes[1], numbers(values[at]), numbers(values[at + 1]), size)
        added = name == "fedhassle::convolve_relu" and sizes[3]
        return work._replace(bytes=work.bytes + size * math.prod(z)) if added else work
    if name == "aten::convolution_backward":
        x, kernel = sizes[1], sizes[2]
        return convolution(x, kernel, numbers(values[4]), numbers(values[5]), size)[1]
    if kind == PRODUCTS:
        a, b = sizes[1:3] if name == "aten::addmm" else sizes[:2]
        result = math.prod(a[:-1]) * b[-1]
        return Work(size * (math.prod(a) + math.prod(b) + result), 2.0 * result * a[-1])
    moved = [
        (len(shape), BYTES.get(kept, 1) * math.prod(shape))
        for shape, kept in zip(sizes, operation.types, strict=False)
        if shape
    ]
    # Beside feature maps, a vector holds the parameters of a whole network, of which little is read.
    maps = [entry for entry in moved if entry[0] > 1] or moved
    return Work(sum(entry for _, entry in maps)) if maps else None


def numbers(text: str) -> list[int]:
    """The integers of a list as a trace writes it."""
    return [int(value) for value in ast.literal_eval(text)]


# Kernels of a trace


def launches(events: Iterable[Mapping[str, Any]]) -> list[Launch]:
    """The kernels of a trace in order, with their operations."""
    events = list(events)
    hosts = [event for event in events if event.get("cat") in ON_HOST and "dur" in event]
    by_id = {event["args"]["External id"]: event for event in hosts if "External id" in event.get("args", {})}
    found = []
    for event in sorted(
        (event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: float(event["ts"])
    ):
        host = by_id.get(event.get("args", {}).get("External id"))
        operation = None if host is None else outermost(host, hosts)
        found.append(Launch(str(event["name"]), float(event["dur"]), operation))
    return found


def outermost(host: Mapping[str, Any], hosts: Iterable[Mapping[str, Any]]) -> Operation:
    """The outermost operation of `WHOLE` around an event on the host; if there is none, the event."""
    begin, end = host["ts"], host["ts"] + host["dur"]
    around = [
        other
        for other in hosts
        if other["name"] in WHOLE
        and other["tid"] == host["tid"]
        and other["ts"] <= begin
        and other["ts"] + other["dur"] >= end
    ]
    event = min(around, key=lambda other: float(other["ts"]), default=host)
    args = event.get("args", {})
    return Operation(
        int(args.get("External id", 0)),
        str(event["name"]),
        tuple(tuple(size) if flat(size) else () for size in args.get("Input Dims", ())),
        tuple(map(str, args.get("Input type", ()))),
        tuple(map(str, args.get("Concrete Inputs", ()))),
    )


def flat(size: Any) -> bool:
    """True for the size of one tensor, and not for those of a list of tensors."""
    return all(isinstance(side, int) for side in size)


def replayed(kernels: Sequence[Launch], replays: int) -> list[Launch]:
    """The kernels of one of several replays, with the median time of each."""
    n = len(kernels) // replays
    if n * replays != len(kernels):
        raise ValueError(f"{len(kernels)} kernels are not {replays} equal replays")
    return [
        Launch(kernels[i].kernel, statistics.median(one.microseconds for one in kernels[i::n]))
        for i in range(n)
    ]


def matched(replay: Sequence[Launch], launched: Sequence[Launch]) -> list[Launch]:
    """The kernels of a replay with the operations of the same kernels as they were launched.

    Copies and fills are other kernels in a graph, so kernels are compared name by name, in order.
    """
    waiting: dict[str, deque[Operation | None]] = defaultdict(deque)
    for one in launched:
        waiting[one.kernel].append(one.operation)
    counts = Counter(one.kernel for one in replay)
    known = {kernel for kernel, operations in waiting.items() if len(operations) == counts[kernel]}
    return [
        one._replace(operation=waiting[one.kernel].popleft() if one.kernel in known else None)
        for one in replay
    ]


# Parts


def parts(kernels: Sequence[Launch], weights: int) -> list[Part]:
    """The parts of a step in order; vectors have as many entries as the network has weights, or more."""
    in_order = list(kinds(kernels, weights))
    ids = [one.operation.id if one.operation else -i - 1 for i, one in enumerate(kernels)]
    found = []
    for (_, kind), group in groupby(range(len(kernels)), lambda i: (ids[i], in_order[i])):
        members = [kernels[i] for i in group]
        operation = members[0].operation
        found.append(
            Part(
                kind,
                label(operation, kind) if operation else members[0].kernel[:60],
                tuple(one.kernel for one in members),
                sum(one.microseconds for one in members),
                work_of(operation, kind) if operation else None,
            )
        )
    return found


def kinds(kernels: Sequence[Launch], weights: int) -> Iterator[str]:
    """The kind of each kernel."""
    backward: dict[int, list[str]] = {}  # names of the kernels of each backward convolution
    for one in kernels:
        if one.operation and WHOLE.get(one.operation.name) == "":
            backward.setdefault(one.operation.id, []).append(one.kernel)
    seen: dict[int, int] = {}
    for one in kernels:
        operation = one.operation
        if operation is None:
            yield next((kind for word, kind in WORDS.items() if word in one.kernel), REST)
        elif operation.id in backward:
            place = seen[operation.id] = seen.get(operation.id, -1) + 1
            yield direction(operation, backward[operation.id], place)
        elif operation.name in WHOLE:
            yield WHOLE[operation.name]
        else:
            largest = max(operation.sizes, key=math.prod, default=())
            if len(largest) == 1 and largest[0] >= weights:
                yield VECTORS
            else:
                yield MAPS if len(largest) > 1 else REST


def direction(operation: Operation, kernels: Sequence[str], place: int) -> str:
    """The direction of a kernel of a backward convolution, which computes the gradient of its input first.

    Kernels without a direction in their name, which reorder tensors or add up partial sums, belong to the one
    before them, or at the start to the one after them.
    """
    if operation.values and operation.values[-1] in ("[True, False, False]", "[False, True, False]"):
        return INPUT if operation.values[-1].startswith("[True") else WEIGHTS
    named = [INPUT if "dgrad" in k else WEIGHTS if "wgrad" in k else "" for k in kernels]
    before = [name for name in named[: place + 1] if name]
    after = [name for name in named[place:] if name]
    if before or after:
        return before[-1] if before else after[0]
    return INPUT if 2 * place < len(kernels) else WEIGHTS


def label(operation: Operation, kind: str) -> str:
    """An operation in a few words."""
    sizes = operation.sizes
    if kind in (FORWARD, INPUT, WEIGHTS):
        x, kernel = sizes[:2] if kind == FORWARD else sizes[1:3]
        at = {"aten::convolution": 3, "fedhassle::convolve_relu": 4}.get(operation.name, 4)
        return layer_label(x, kernel, numbers(operation.values[at]))
    several = [size for size in sizes if len(size) > 1] or [size for size in sizes if size]
    name = operation.name.rpartition("::")[2][:48]
    return f"{name} {in_short(several[0])}" if several else name


def layer_label(x: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> str:
    """A convolution in a few words."""
    step = f"/{stride[0]}" if stride[0] > 1 else ""
    return f"{in_short(x)} → {kernel[0]}, {kernel[2]}×{kernel[3]}{step}"


def in_short(size: Sequence[int]) -> str:
    """The size of a tensor."""
    return "×".join(map(str, size))
