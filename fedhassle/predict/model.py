"""A trained model, loaded from its file without running any code from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.views import Views, make_views
from fedhassle.engine.tensor_files import read_arrays
from fedhassle.errors import UserError, require
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import find
from fedhassle.nets import NETS, Net, images_a_pass
from fedhassle.runs.folder import Folder, resume_command
from fedhassle.settings.build import build_method
from fedhassle.settings.schema import resolved_device
from fedhassle.vectors import Arrays


class Prediction(NamedTuple):
    """What a model says of N images."""

    classes: np.ndarray  # (N,), numbers into the model's class names
    probabilities: np.ndarray  # (N, M), float64: in float32 many a sure prediction is 1 exactly


@dataclass(frozen=True)
class TrainedModel:
    """A method's final state, and what it needs to know of images."""

    method: Method
    state: Arrays
    views: Views
    class_names: tuple[str, ...]
    about: dict[str, Any]

    @property
    def modes(self) -> tuple[str, ...]:
        """The predictions to choose from: SM, UM and EM for HASSLE, one for most methods."""
        return tuple(self.method.modes) or (self.method.headline,)

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Height, width and channels of the images that it takes."""
        channels, height, width = self.method.net.shape
        return height, width, channels

    def on(self, device: str) -> TrainedModel:
        """The same model on a device: auto, cpu or cuda."""
        require(device in ("auto", "cpu", "cuda"), f"the device is auto, cpu or cuda, got {device!r}")
        place = torch.device(resolved_device(device))
        views = self.views._replace(scale=self.views.scale.to(place), shift=self.views.shift.to(place))
        return replace(self, views=views, state={name: array.to(place) for name, array in self.state.items()})

    def predict(self, images: np.ndarray, mode: str | None = None) -> Prediction:
        """Classes and probabilities of images (N, H, W, C) or (N, H, W), uint8; `mode`: SM, UM or EM."""
        logits = self.logits(images)
        return prediction(logits[chosen(self.method.headline if mode is None else mode, tuple(logits))])

    def predictions(self, images: np.ndarray) -> dict[str, Prediction]:
        """What each of the modes says of the same images, by their names."""
        logits = self.logits(images)
        return {mode: prediction(logits[mode]) for mode in self.modes}

    @torch.no_grad()
    def logits(self, images: np.ndarray) -> dict[str, Tensor]:
        """Logits (N, M) by every name that the method predicts under."""
        pixels = torch.from_numpy(self.checked(images)).to(self.views.scale.device)
        batches = [
            self.method.predict(self.state, self.views.normalise(x))
            for x in torch.split(pixels, images_a_pass(pixels))
        ]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def checked(self, images: np.ndarray) -> np.ndarray:
        """The images as (N, H, W, C), if they are of the model's shape."""
        height, width, channels = self.image_size
        array = images[..., None] if images.ndim == 3 and channels == 1 else images
        expected = (height, width, channels)
        if array.ndim != 4 or array.shape[1:] != expected or array.dtype != np.uint8 or not len(array):
            raise UserError(
                f"expected uint8 images (N, {height}, {width}, {channels}), got {images.dtype} {images.shape}"
            )
        return np.ascontiguousarray(array)


def prediction(z: Tensor) -> Prediction:
    """Classes and probabilities from logits (N, M)."""
    probabilities = z.cpu().double().softmax(1)
    require(not bool(probabilities.isnan().any()), "the model predicts NaN: its training diverged")
    return Prediction(z.argmax(1).cpu().numpy(), probabilities.numpy())


def chosen(mode: str, known: tuple[str, ...]) -> str:
    """The name of a mode, however its letters are written."""
    names = {name.lower(): name for name in known}
    if mode.lower() not in names:
        raise UserError(f"unknown mode {mode!r}: this model predicts with {', '.join(known)}")
    return names[mode.lower()]


def load(path: str | Path, allow_import: bool = False) -> TrainedModel:
    """The model in a file or a finished run's folder.

    A method or network of one's own is imported only if that is allowed.
    """
    path = model_file(Path(path))
    arrays, about = read_arrays(path)
    if not about.keys() >= {"method", "net", "shape", "class_names", "mean", "std"}:
        raise UserError(f"{path} is no trained model: take the model.safetensors of a finished run")
    settings = dict(about["method"])
    name = settings.pop("name")
    for kind, wanted, known in (("method", name, METHODS), ("network", about["net"], NETS)):
        if wanted not in known and not allow_import:
            raise UserError(
                f"{path} needs the {kind} {wanted!r}: load(path, allow_import=True), or --allow-import, "
                "imports it"
            )
    net = Net(find(about["net"], NETS, "network"), tuple(about["shape"]), len(about["class_names"]))
    views = make_views(about["mean"], about["std"], False, 0, torch.device("cpu"))
    return TrainedModel(build_method(name, settings, net), arrays, views, tuple(about["class_names"]), about)


def model_file(path: Path) -> Path:
    """The file of a model; in a folder, that of the run there."""
    if not path.is_dir():
        return path
    folder = Folder(path)
    if not folder.model.exists():
        hint = f": finish the run with {resume_command(folder)}" if folder.begun else ""
        raise UserError(f"{path} holds no {folder.model.name}{hint}")
    return folder.model
