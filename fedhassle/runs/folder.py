"""The folder of a run: its files, claiming one for a new run, and finding those that exist."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from fedhassle.errors import UserError
from fedhassle.files import file_name, remove_unfinished, write_text
from fedhassle.settings.request import Request, from_json, read_tables, to_json


class Folder(NamedTuple):
    """The files of a run."""

    path: Path

    @property
    def begun(self) -> bool:
        """True if the folder holds a run, simulated or of a federation."""
        return self.request.exists() or self.config.exists() or self.audit.exists()

    @property
    def finished(self) -> bool:
        """True if the folder holds a finished run."""
        return self.config.exists() and self.summary.exists()

    @property
    def request(self) -> Path:
        """The request, until config.toml replaces it: a run can be resumed from its first second on."""
        return self.path / "request.json"

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def split(self) -> Path:
        """The split: the images of each client."""
        return self.path / "split.npz"

    @property
    def own_code(self) -> Path:
        """Hashes of the source of a user's own method or network; only with these."""
        return self.path / "own_code.txt"

    @property
    def metrics(self) -> Path:
        """One line of JSON per evaluated round."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The whole result in one small file, written last: only finished runs have it."""
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The final model, with everything that prediction needs."""
        return self.path / "model.safetensors"

    @property
    def card(self) -> Path:
        """The model card."""
        return self.path / "model.md"

    @property
    def best(self) -> Path:
        """The model of the round that scored best on the sites' validation images; federations only."""
        return self.path / "best.safetensors"

    @property
    def audit(self) -> Path:
        """One line of JSON per event at a site; federations only."""
        return self.path / "audit.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files; only with `track=tensorboard`."""
        return self.path / "tensorboard"

    @property
    def mlflow(self) -> Path:
        """MLflow's id of the run, and its database if there is no server; only with `track=mlflow`."""
        return self.path / "mlflow"

    @property
    def curves(self) -> Path:
        """A picture of the accuracy by round."""
        return self.path / "curves.png"

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, to resume from."""
        return self.path / "checkpoints"

    @property
    def memory(self) -> Path:
        """The state that clients keep between rounds; only if the method has such state."""
        return self.path / "memory"


def claim(request: Request, out: Path | None) -> Folder:
    """A folder for a new run; the request is written at once, so that a crash loses nothing."""
    folder = Folder(Path(out) if out else new_folder(request))
    if folder.begun:
        raise UserError(f"{folder.path} holds a run already: {resume_command(folder)}, or another --out")
    remove_unfinished(folder.path)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise UserError(f"{folder.path} exists and is not an empty folder: choose another --out")
    write_text(folder.request, to_json(request))
    return folder


def new_folder(request: Request) -> Path:
    """Makes a new folder under runs/; it is made at once, so that no other process chooses it too."""
    while True:
        path = default_folder(request)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            runs = path.parent
            if runs.is_symlink() and not runs.exists():
                raise UserError(
                    f"{runs} is a link to {runs.readlink()}, which does not exist: make it, or name an --out"
                ) from None
        else:
            return path


def default_folder(request: Request) -> Path:
    """`runs/METHOD-DATA-TIME`, with a number appended if that exists."""
    time = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join([file_name(request.method), file_name(Path(request.data).stem), time])
    return next(path for each in numbered(name) if not (path := Path("runs") / each).exists())


def folder_names(names: Sequence[str]) -> list[str]:
    """Folder names for runs of these names, with a number appended to repeated ones."""
    made: list[str] = []
    for name in names:
        made.append(next(each for each in numbered(file_name(name) or "run") if each not in made))
    return made


def numbered(name: str) -> Iterator[str]:
    """A name, then the name with the numbers 2, 3 and so on."""
    yield name
    yield from (f"{name}-{n}" for n in itertools.count(2))


def release(folder: Folder) -> None:
    """Removes the folder of a request that turned out to be impossible."""
    folder.request.unlink(missing_ok=True)
    made = [folder.path, *([Path("runs")] if folder.path.parent == Path("runs") else [])]
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def stored_request(folder: Folder) -> Request:
    """The settings in a folder: resolved, or the request if the run was cut before that."""
    if folder.config.exists():
        return Request((read_tables(folder.config),))
    try:
        return from_json(folder.request.read_text("utf-8"))
    except ValueError as error:
        raise UserError(
            f"{folder.request} is damaged ({error}): remove {folder.path} and run again"
        ) from error


def resume_command(*folders: Folder) -> str:
    """The command that resumes runs; FOLDER stands for the folder of a federation."""
    command = "federation run FOLDER --out" if folders[0].audit.exists() else "resume"
    return f"fedhassle {command} {shlex.join(str(folder.path) for folder in folders)}"


def run_folders(path: Path) -> list[Path]:
    """The runs in a folder of runs; any other path alone."""
    if not path.is_dir() or Folder(path).begun:
        return [path]
    return sorted(folder for folder in path.iterdir() if Folder(folder).begun) or [path]


def result_folders(path: Path) -> list[Path]:
    """The subfolders of a folder that holds finished runs; any other path alone."""
    if not path.is_dir() or Folder(path).begun or is_result(path):
        return [path]
    below = sorted(folder for folder in path.iterdir() if folder.is_dir())
    return below if any(map(is_result, below)) else [path]


def is_result(path: Path) -> bool:
    """True for the folder of a finished run, a .json file, and a missing path: reading it gives the error."""
    return Folder(path).summary.exists() if path.is_dir() else path.suffix == ".json" or not path.exists()
