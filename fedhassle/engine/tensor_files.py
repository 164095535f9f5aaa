"""Tensors with metadata in a safetensors file, and folders with one such file per round."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedhassle.errors import DamagedError, UserError
from fedhassle.files import atomic, paths_in
from fedhassle.vectors import Arrays

DIGITS = 6  # of the round in a file name, so that names sort by round


def write_arrays(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    """Writes arrays and `about` (JSON) atomically, with a checksum."""
    # Clones, since the format rejects tensors that share memory, as w_S and its copy w_U may.
    plain = {name: array.detach().cpu().contiguous().clone() for name, array in arrays.items()}
    words = json.dumps(about, allow_nan=False)
    with atomic(path) as temporary:
        # Not `save_file`, which leaves its own temporary file when the process is killed.
        temporary.write_bytes(save(plain, metadata={"about": words, "sha256": checksum(plain, words)}))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads a file of `write_arrays`; raises an error that names the file if it is not one.

    It is a `DamagedError`, or a plain `UserError` if the system cannot read the file, which may be intact.
    Nobody has checked the entries of the metadata.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
    except SafetensorError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if "about" not in metadata:
        raise DamagedError(f"{path} was not written by fedhassle: it has no description in its metadata")
    if checksum(arrays, metadata["about"]) != metadata.get("sha256"):
        raise DamagedError(f"{path} is damaged: its checksum does not match its contents")
    try:
        about = json.loads(metadata["about"])
        json.dumps(about, allow_nan=False)  # Python reads NaN and 1e999, and cannot write them as JSON again
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: its description is not JSON ({error})") from error
    if not isinstance(about, dict):
        raise DamagedError(f"{path} is damaged: its description is no table")
    return arrays, about


def checksum(arrays: Arrays, words: str) -> str:
    """SHA-256 of the metadata and of each array's name and bytes."""
    digest = hashlib.sha256(words.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def round_file(folder: Path, t: int) -> Path:
    """Path of the file of round t in a folder."""
    return folder / f"round-{t:0{DIGITS}d}.safetensors"


def round_files(folder: Path) -> dict[int, Path]:
    """Files of a folder by round, oldest first."""
    paths = paths_in(folder, f"round-{'[0-9]' * DIGITS}.safetensors")
    return {int(path.stem.removeprefix("round-")): path for path in paths}
