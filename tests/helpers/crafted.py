"""Files with crafted metadata and valid checksums."""

import copy

from safetensors.torch import save

from fedhassle.engine.tensor_files import checksum

DROPPED = object()


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


ODD = [
    *(DROPPED, None, True, 0, 1, -1, 2, 10**9, 10**18, 10**400, 1.5, 1e39, 1e308, 5e-324),
    *(float("nan"), float("inf"), "", "x", "\0", "a" * 100_000, "os:system", "resnet8", "fedavg"),
    *([], {}, [[]], [None], [1], [1, 2, 3], [3, 12, 12], [1, -12, -12], [10**9] * 3, [0.5] * 3, ["a"] * 4),
    *(["a"] * 100_000, {"name": "fedavg"}, {"name": None}, {"name": "os:system"}, deep(50), deep(500)),
    *("\x1b[2J\n", ["\x1b[2J\n"] * 4, {"\x1b[2J\n": 1}, {"\ud800": "\ud800"}, "\ud800"),
]


def changed(about, at, value):
    """Returns metadata with another value of one entry, or without it."""
    made = copy.deepcopy(about)
    *above, last = at
    table = made
    for key in above:
        table = table[key]
    if value is not DROPPED:
        table[last] = value
    elif last in table or isinstance(table, list):
        del table[last]
    return made


def written(path, arrays, words):
    """Writes a file with any text as its description, and the checksum that belongs to it."""
    path.write_bytes(save(arrays, metadata={"about": words, "sha256": checksum(arrays, words)}))
    return path
