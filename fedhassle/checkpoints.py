"""Tensors and a few words about them in one safetensors file; checkpoints that survive damage."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedhassle.errors import UserError
from fedhassle.files import atomic
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

KEPT = 2  # checkpoints on disk: when the newest is damaged, the one before it serves


class Checkpoint(NamedTuple):
    """All that a run needs to go on after round t."""

    t: int
    state: Arrays
    memory: dict[str, Arrays]  # by client
    history: list[dict[str, Any]]  # the metrics so far, a line each


def write_arrays(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    """Writes arrays and `about` (JSON) atomically, with a checksum."""
    # Clones: the format refuses tensors that share memory, as w_U and its copy of w_S may.
    plain = {name: array.detach().cpu().contiguous().clone() for name, array in arrays.items()}
    words = json.dumps(about, allow_nan=False)
    with atomic(path) as temporary:
        # Not `save_file`: it leaves a temporary file of its own when it is killed.
        temporary.write_bytes(save(plain, metadata={"about": words, "sha256": checksum(plain, words)}))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads what `write_arrays` wrote; anything else is an error that names the file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if "about" not in metadata:
        raise UserError(f"{path} was not written by fedhassle: it has no description in its metadata")
    if checksum(arrays, metadata["about"]) != metadata.get("sha256"):
        raise UserError(f"{path} is damaged: its checksum does not match its contents")
    return arrays, json.loads(metadata["about"])


def checksum(arrays: Arrays, words: str) -> str:
    """sha256 over the words and every array's name and bytes."""
    digest = hashlib.sha256(words.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint, then removes all but the newest `KEPT`."""
    arrays = {f"state/{name}": array for name, array in checkpoint.state.items()}
    # Numbered, with the names in the words: a client may be called anything.
    kept = [(client, name) for client, arrays in checkpoint.memory.items() for name in arrays]
    arrays |= {f"memory/{i}": checkpoint.memory[client][name] for i, (client, name) in enumerate(kept)}
    about = {"round": checkpoint.t, "history": checkpoint.history, "memory": kept}
    write_arrays(folder / file_name(checkpoint.t), arrays, about)
    for old in checkpoint_files(folder)[:-KEPT]:
        old.unlink()


def load_checkpoint(folder: Path, device: torch.device) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none."""
    for path in reversed(checkpoint_files(folder)):
        try:
            arrays, about = read_arrays(path)
        except UserError as error:
            log.warning("%s; going back to the checkpoint before it", error)
            continue
        return unpack({name: array.to(device) for name, array in arrays.items()}, about)
    return None


def unpack(arrays: Arrays, about: dict[str, Any]) -> Checkpoint:
    """A checkpoint from the arrays and words of its file."""
    state = {name.removeprefix("state/"): v for name, v in arrays.items() if name.startswith("state/")}
    memory: dict[str, Arrays] = {}
    for i, (client, name) in enumerate(about["memory"]):
        memory.setdefault(client, {})[name] = arrays[f"memory/{i}"]
    return Checkpoint(about["round"], state, memory, about["history"])


def discard_after(folder: Path, t: int) -> None:
    """Removes the checkpoints after round t: they are damaged, and would pass for the newest."""
    for path in checkpoint_files(folder):
        if path > folder / file_name(t):
            path.unlink()


def file_name(t: int) -> str:
    """The name of a checkpoint's file; names sort like rounds."""
    return f"round-{t:06d}.safetensors"


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("round-*.safetensors"))
