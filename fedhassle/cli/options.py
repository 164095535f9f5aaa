"""Options that several commands share, and the request that they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedhassle.cli.completion import complete_words
from fedhassle.data.site.listing import NO_LABELS
from fedhassle.settings.request import Request, is_setting, request

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A preset (quick or paper; default: quick) or a TOML file, then settings.",
        autocompletion=complete_words,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the named data sets (default: $FEDHASSLE_DATA, or the cache folder)."),
]


def label_file(word: str) -> Path:
    """Returns the path of a label file; `none` stands for no labels at all."""
    return NO_LABELS if word == "none" else Path(word)


Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|none",
        parser=label_file,
        help="Label file; none: no image has a label, in any folder (default: labels.csv beside them).",
    ),
]
PATIENTS = (
    "How the patient of an image is known: the column patient of labels.csv, the N-th folder of its path, "
    "its file name such as 'name {patient}_*', or PatientID of DICOM"
)
Patients = Annotated[
    str | None,
    typer.Option(
        metavar="column|folder N|name PATTERN|dicom",
        help=f"{PATIENTS} (default: the column or PatientID, if there is one).",
    ),
]
AgreedPatients = Annotated[
    str | None,
    typer.Option(
        metavar="column|folder N|name PATTERN|dicom", help=f"{PATIENTS} (default: nothing is agreed)."
    ),
]
Intensities = Annotated[
    str | None,
    typer.Option(
        metavar="'N bits'|'window LOW HIGH'|'percentiles LOW HIGH'|'own window'",
        help="How grey images of more than 8 bits become 0 to 255: the upper 8 of N bits, a window of "
        "values, percentiles of each file, or the window that a DICOM file names (default: 16 bits).",
    ),
]
Results = Annotated[Path, typer.Option(help="Ledger of finished runs.")]
Device = Annotated[str | None, typer.Option(help="Device to train on: auto, cpu or cuda (default: auto).")]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="local|auto|HOST:PORT",
        help="Ray cluster of the workers: a new one on this machine (local), the one that it belongs to "
        "(auto), or one by its address (default: local if workers is more than 1).",
    ),
]


def parse_request(
    words: Sequence[str] | None, data_dir: Path | None, device: str | None, ray: str | None = None
) -> Request:
    """Returns the settings that the words and options of a command request."""
    config, changes = None, list(words or [])
    if changes and not is_setting(changes[0]):
        config, *changes = changes
    return request(config, [*changes, *options_as_settings(data_dir, device, ray)])


def options_as_settings(data_dir: Path | None, device: str | None, ray: str | None = None) -> list[str]:
    """Returns the given options as KEY=VALUE words."""
    given = {"data.folder": None if data_dir is None else str(data_dir), "device": device, "ray": ray}
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None
    ]
