"""Proposals of what a site should label next, as a CSV to fill in and as a page with thumbnails."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from fedhassle.data.npz import Images
from fedhassle.data.site.folder import SiteData
from fedhassle.data.site.intensities import IntensityRule, UnusableError
from fedhassle.data.site.listing import file_of, frame_of
from fedhassle.data.site.pictures import read_picture
from fedhassle.federation.pages import page
from fedhassle.files import atomic, write_text
from fedhassle.predict.model import TrainedModel
from fedhassle.predict.next_labels import Proposal

SIDE = 224  # pixels, the longer side of a thumbnail


def write_table(path: Path, chosen: Sequence[Proposal]) -> None:
    """Writes a CSV with an empty column `label`, whose rows can be added to labels.csv."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["file", "label", "uncertainty", "disagreement"])
        for one in chosen:
            lines.writerow([file_of(one.name), "", f"{one.uncertainty:.4f}", f"{one.disagreement:.4f}"])


def write_page(
    path: Path,
    chosen: Sequence[Proposal],
    site: SiteData,
    data: Path,
    model: TrainedModel,
    named: dict[str, str],
) -> None:
    """Writes a page with a thumbnail of each image; `named`: the model and the table."""
    text = page(
        "next_labels",
        proposals=chosen,
        thumbnails=[
            data_uri(thumbnail(data, one.name, site.x[one.row], model.intensities)) for one in chosen
        ],
        links=[(data / file_of(one.name) if data.is_dir() else data).resolve().as_uri() for one in chosen],
        unlabelled=int((site.y < 0).sum()),
        data=str(data),
        class_names=model.class_names,
        several=len(model.modes) > 2,
        patients=site.patients is not None,
        **named,
    )
    write_text(path, text)


def thumbnail(data: Path, name: str, pixels: Images, rule: IntensityRule) -> Images:
    """Returns what the model sees of an image, in more pixels if its file has them; else the model's own."""
    height, width, channels = pixels.shape
    scale = max(1.0, SIDE / max(height, width))
    try:
        size = round(height * scale), round(width * scale), channels
        return read_picture(data / file_of(name), *size, rule, frame_of(name)).pixels
    except UnusableError:
        return pixels


def data_uri(pixels: Images) -> str:
    """Returns an image as a PNG in an address."""
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
