"""Makes fedhassle/data/fmnist-mini.npz: make_fmnist_mini.py FMNIST.npz [OUT.npz].

The input has all of Fashion-MNIST as x_train, y_train, x_test, y_test. The same input and the same version of
liblzma give the same file, bit for bit.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

OUT = Path(__file__).parents[1] / "fedhassle" / "data" / "fmnist-mini.npz"
SEED = 0
TRAIN, TEST = 1_200, 200  # images of each class


def choose(y: Bytes, per_class: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """Draws `per_class` images of each class without replacement, in the order of the full set."""
    drawn = [generator.permutation(np.flatnonzero(y == label))[:per_class] for label in np.unique(y)]
    return np.sort(np.concatenate(drawn))


def subset(full: dict[str, Bytes], train: int = TRAIN, test: int = TEST) -> dict[str, Bytes]:
    """Returns the class-balanced subset of the full arrays."""
    generator = np.random.default_rng(SEED)
    first = choose(full["y_train"], train, generator)
    second = choose(full["y_test"], test, generator)
    return {
        "x_train": full["x_train"][first],
        "y_train": full["y_train"][first],
        "x_test": full["x_test"][second],
        "y_test": full["y_test"][second],
    }


def write(path: Path, arrays: dict[str, Bytes]) -> None:
    """Writes an .npz with LZMA, a seventh smaller than NumPy's own, and without timestamps."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system = 3  # the default depends on the platform
            member.external_attr = 0o644 << 16
            archive.writestr(member, content.getvalue(), zipfile.ZIP_LZMA)


def main(source: str, out: str | Path = OUT) -> None:
    """Reads the full set, writes the subset and prints its size."""
    with np.load(source, allow_pickle=False) as file:
        full = {name: file[name].astype(np.uint8) for name in ("x_train", "y_train", "x_test", "y_test")}
    write(Path(out), subset(full))
    print(f"{out}: {Path(out).stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
