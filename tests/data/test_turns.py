"""Memory while pictures are decoded: side by side only while they are small, and never for more than one."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from fedhassle.data import npz
from fedhassle.data.site import folder
from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.turns import Turns
from fedhassle.errors import UserError


def most_at_once(sizes, most):
    """Decodes all sizes in threads of their own; returns the most pixels and the most threads at once."""
    turns, lock, now, seen = Turns(most), threading.Lock(), [], []

    def decode(pixels):
        with turns.turn(pixels):
            with lock:
                now.append(pixels)
                seen.append((sum(now), len(now)))
            waiting.wait(0.02)
            with lock:
                now.remove(pixels)

    waiting = threading.Event()
    threads = [threading.Thread(target=decode, args=(pixels,)) for pixels in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == len(sizes) and not now
    return max(total for total, _ in seen), max((count for total, count in seen if total > most), default=0)


@pytest.mark.parametrize("sizes", [[3] * 8, [5, 10, 3, 3, 3, 10], [100, 100, 100], [1, 100, 1, 100]])
def test_pictures_share_the_memory_or_are_alone(sizes):
    total, crowd = most_at_once(sizes, most=10)
    assert total <= max(10, *sizes) and crowd <= 1


def test_a_turn_ends_with_an_error_too():
    turns = Turns(10)
    for _ in range(3):
        with pytest.raises(ValueError, match="damaged"), turns.turn(10):
            raise ValueError("damaged")


MEMORY = """
import resource, sys
from pathlib import Path
from fedhassle.data.site.folder import ImageForm, read_site
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
site = read_site(Path(sys.argv[1]), ImageForm(("a", "b"), 8, 8, 3))
print(len(site.y), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts other units elsewhere")
def test_huge_pictures_in_small_files_take_the_memory_of_one(tmp_path):
    """A picture of 30 megapixels takes 16 bytes a pixel, 480 MB; four at once would take 1,900 MB."""
    for k in range(6):
        Image.new("RGBA", (6000, 5000), (k, 0, 0, 9)).save(tmp_path / f"{k}.png")
    # By way of a shell: a forked process starts with the peak of its parent.
    command = ["sh", "-c", '"$0" -c "$1" "$2"', sys.executable, MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    images, megabytes = map(int, done.stdout.split())
    assert images == 6 and megabytes < 900


def test_images_that_this_machine_cannot_hold_are_refused_before_any_is_read(tmp_path, monkeypatch):
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    monkeypatch.setattr(folder, "physical_memory", lambda: 1e6)
    with pytest.raises(UserError, match=r"1 image of 1000×1000×3 needs 0\.0 GB .* this machine has 0\.0 GB"):
        read_site(tmp_path, ImageForm(("a", "b"), 1000, 1000, 3))
    assert len(read_site(tmp_path, ImageForm(("a", "b"), 8, 8, 3)).y) == 1


def test_a_stack_of_too_many_images_is_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", x=np.zeros((11, 2, 2), np.uint8))
    assert len(npz.read_images(tmp_path / "x.npz")) == 11
    monkeypatch.setattr(npz, "MOST_IMAGES", 10)
    with pytest.raises(UserError, match="has 11 images; expected at most 10 in a file"):
        npz.read_images(tmp_path / "x.npz")


def test_floats_are_converted_in_slices_to_the_same_pixels(tmp_path, rng):
    x = rng.random((2 * npz.SLICE + 1, 2, 2)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    assert (npz.read_images(tmp_path / "x.npy")[..., 0] == np.rint(x * np.float32(255))).all()
