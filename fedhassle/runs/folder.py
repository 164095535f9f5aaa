"""The folder of a run: its files, claiming one for a new run, and finding those that exist."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedhassle.errors import UserError
from fedhassle.files import file_name, remove_unfinished, write_text
from fedhassle.settings.request import Request, from_json, read_tables, to_json


class File:
    """A file or subfolder of a run's folder, as an attribute that gives its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, owner: object = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class Folder:
    """The files of a run."""

    path: Path

    request = File("request.json")  # until config.toml replaces it, so that any run can be resumed
    config = File("config.toml")  # the resolved settings
    split = File("split.npz")  # the images of each client
    own_code = File("own_code.txt")  # hashes of the source of a user's own method or network, if any
    metrics = File("metrics.jsonl")  # one line per evaluated round
    summary = File("summary.json")  # the whole result, written last: only finished runs have it
    model = File("model.safetensors")  # the final model, with everything that prediction needs
    card = File("model.md")  # the model card
    curves = File("curves.png")  # the accuracy by round
    log = File("log.txt")
    checkpoints = File("checkpoints")
    memory = File("memory")  # the state that clients keep between rounds, if the method has any
    best = File("best.safetensors")  # federations only: the best model on the sites' validation images
    audit = File("audit.jsonl")  # federations only: one line per event at a site
    tensorboard = File("tensorboard")  # event files, with `track=tensorboard`
    varied = File("varied.txt")  # of one of several runs: KEY=VALUE of each setting in which they differ
    wandb = File("wandb")  # the run's id at W&B, and its log, with `track=wandb`
    mlflow = File("mlflow")  # MLflow's run id, and its database without a server, with `track=mlflow`

    @property
    def begun(self) -> bool:
        """True if the folder holds a run, simulated or of a federation."""
        return self.request.exists() or self.config.exists() or self.audit.exists()

    @property
    def finished(self) -> bool:
        """True if the folder holds a finished run."""
        return self.config.exists() and self.summary.exists()


def claim(request: Request, out: Path | None) -> Folder:
    """A folder for a new run; the request is written at once, so that a crash loses nothing."""
    folder = Folder(Path(out) if out else new_folder(request))
    if folder.begun:
        raise UserError(
            f"{folder.path} already holds a run: resume it with {resume_command(folder)}, "
            "or choose another --out"
        )
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
    """`runs/METHOD-DATA-TIME`, by the class of a user's own method; with a number appended if that exists."""
    time = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join([file_name(request.method.rpartition(":")[2]), file_name(Path(request.data).stem), time])
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
    folder.varied.unlink(missing_ok=True)
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
