"""A trained model, loaded from its file without executing code from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.site.folder import ImageForm
from fedhassle.data.site.intensities import IntensityRule, intensity_rule
from fedhassle.data.views import Views, make_views
from fedhassle.engine.evaluate import check_predictions
from fedhassle.engine.tensor_files import read_arrays
from fedhassle.errors import UserError, first_line, require
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import brief, described, find
from fedhassle.nets import NETS, Net, images_a_pass, n_parameters
from fedhassle.predict.metadata import ModelMetadata, checked_metadata, checked_settings
from fedhassle.runs.folder import Folder, resume_command
from fedhassle.settings.build import build_method
from fedhassle.settings.schema import resolved_device
from fedhassle.vectors import Arrays

WHICH = ("best", "last")  # rounds whose model a run's folder holds


class Prediction(NamedTuple):
    """The predictions of a model for N images."""

    classes: np.ndarray  # (N,), numbers into the model's class names
    probabilities: np.ndarray  # (N, M), float64: in float32 many confident predictions round to 1


@dataclass(frozen=True)
class TrainedModel:
    """A method's final state, and the views and classes of its images."""

    method: Method
    state: Arrays
    views: Views
    class_names: tuple[str, ...]
    about: dict[str, Any]

    @property
    def modes(self) -> tuple[str, ...]:
        """The available predictions: SM, UM and EM for HASSLE, one for most methods."""
        return tuple(self.method.modes) or (self.method.headline,)

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        channels, height, width = self.method.net.shape
        return height, width, channels

    @property
    def intensities(self) -> IntensityRule:
        """The rule by which grey images of more than 8 bits become 0 … 255."""
        return intensity_rule(self.about.get("intensities"))

    @property
    def form(self) -> ImageForm:
        """The form that images are converted to."""
        return ImageForm(self.class_names, *self.image_size, intensities=self.intensities)

    def on(self, device: str) -> TrainedModel:
        """Returns the model on a device: auto, cpu or cuda."""
        require(device in ("auto", "cpu", "cuda"), f"the device is auto, cpu or cuda, got {device!r}")
        place = torch.device(resolved_device(device))
        views = self.views._replace(scale=self.views.scale.to(place), shift=self.views.shift.to(place))
        return replace(self, views=views, state={name: array.to(place) for name, array in self.state.items()})

    def predict(self, images: np.ndarray, mode: str | None = None) -> Prediction:
        """Predicts classes and probabilities of uint8 images (N, H, W, C) or (N, H, W), by SM, UM or EM."""
        logits = self.logits(images)
        return prediction_from(
            logits[resolve_mode(self.method.headline if mode is None else mode, tuple(logits))]
        )

    def predictions(self, images: np.ndarray) -> dict[str, Prediction]:
        """Returns the prediction of each mode for the same images, by name."""
        logits = self.logits(images)
        return {mode: prediction_from(logits[mode]) for mode in self.modes}

    @torch.no_grad()
    def logits(self, images: np.ndarray) -> dict[str, Tensor]:
        """Returns logits (N, M) under each name that the method predicts."""
        pixels = torch.from_numpy(self.as_batch(images)).to(self.views.scale.device)
        batches = [
            self.method.predict(self.state, self.views.normalise(x))
            for x in torch.split(pixels, images_a_pass(pixels))
        ]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def as_batch(self, images: np.ndarray) -> np.ndarray:
        """Returns the images as (N, H, W, C); another shape than the model's is an error."""
        height, width, channels = self.image_size
        require(
            isinstance(images, np.ndarray),
            f"expected a NumPy array of images, got {described(images)}: numpy.stack makes one of a list",
        )
        array = images[..., None] if images.ndim == 3 and channels == 1 else images
        expected = (height, width, channels)
        if array.ndim != 4 or array.shape[1:] != expected or array.dtype != np.uint8 or not len(array):
            raise UserError(
                f"expected uint8 images (N, {height}, {width}, {channels}), got {images.dtype} {images.shape}"
                f"{how_to_convert(images)}"
            )
        return np.ascontiguousarray(array)


def how_to_convert(images: np.ndarray) -> str:
    """Advice on numbers that are no uint8; empty for other values."""
    if np.issubdtype(images.dtype, np.floating):
        return ": convert numbers from 0 to 1 with (255 * images).round().astype('uint8')"
    whole = np.issubdtype(images.dtype, np.integer) and images.dtype != np.uint8
    return ": convert numbers from 0 to 255 with images.astype('uint8')" if whole else ""


def prediction_from(z: Tensor) -> Prediction:
    """Returns classes and probabilities from logits (N, M)."""
    probabilities = z.cpu().double().softmax(1)
    require(not bool(probabilities.isnan().any()), "the model predicts NaN: its training diverged")
    return Prediction(z.argmax(1).cpu().numpy(), probabilities.numpy())


def resolve_mode(mode: str, known: tuple[str, ...]) -> str:
    """Returns the name of a mode, which may be given in upper or lower case."""
    names = {name.lower(): name for name in known}
    if mode.lower() not in names:
        raise UserError(f"unknown mode {mode!r}: this model predicts with {', '.join(known)}")
    return names[mode.lower()]


def load(path: str | Path, allow_import: bool = False, which: str | None = None) -> TrainedModel:
    """Loads the model in a file, or in the folder of a finished run.

    `which`: in a folder, the model of the `best` or of the `last` round; by default `model_file` chooses. A
    user's own method or network is imported only with `allow_import`.
    """
    path = model_file(Path(path), which)
    arrays, about = read_arrays(path)
    try:
        metadata = checked_metadata(about)
    except UserError as error:
        hint = "use the model.safetensors of a finished run"
        raise UserError(f"{path} is not a trained model ({error}): {hint}") from error
    own = [
        f"the {kind} {brief(name)}"
        for kind, name, known in (("method", metadata.method.name, METHODS), ("network", metadata.net, NETS))
        if name not in known
    ]
    if own and not allow_import:
        raise UserError(
            f"{path} needs {' and '.join(own)}: allow its import with load(path, allow_import=True) or "
            "--allow-import"
        )
    try:
        made = TrainedModel(
            build_known_method(metadata, arrays), arrays, views_of(metadata), metadata.class_names, about
        )
        check_arrays(made, 2 if own else 0)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return made


def build_known_method(metadata: ModelMetadata, arrays: Arrays) -> Method:
    """Returns the method that the metadata name, with its network."""
    build, classes = find(metadata.net, NETS, "network"), len(metadata.class_names)
    # A file may name any size: nothing is allocated that the weights in it cannot fill.
    if metadata.net in NETS:
        there = sum(array.numel() for array in arrays.values())
        needed = n_parameters(build, metadata.shape, classes)
        require(needed <= there, f"its network needs {needed:,} weights, the file has {there:,} numbers")
    net = Net(build, metadata.shape, classes)
    return build_method(metadata.method.name, checked_settings(metadata.method), net)


def views_of(metadata: ModelMetadata) -> Views:
    """Returns the views by which the images are normalised."""
    return make_views(metadata.mean, metadata.std, False, 0, torch.device("cpu"))


def check_arrays(model: TrainedModel, images: int) -> None:
    """Raises a `UserError` if the model cannot predict with its arrays: tries some blank images, or none.

    None take no memory, however large the images are; but a user's own code may not bear them.
    """
    height, width, channels = model.image_size
    blank = torch.zeros(images, channels, height, width)
    try:
        check_predictions(model.method, model.state, blank, len(model.class_names))
    except UserError:
        raise
    except Exception as error:  # arrays that lack or do not fit: PyTorch raises many kinds of errors
        raise UserError(
            f"its arrays do not fit its metadata ({type(error).__name__}: {brief(first_line(error))})"
        ) from error


def model_file(path: Path, which: str | None = None) -> Path:
    """Returns the path of a model file; for a run's folder, the one in it that `which` names.

    By default it is the model of the best round if the sites' validation images have chosen one, else that of
    the last round. Test images never choose: they would no longer be a test.
    """
    require(which in (None, *WHICH), f"the model is that of the best or last round, got {which!r}")
    if not path.is_dir():
        require(which is None, f"{path} is a model already: choose a round in the folder of its run")
        return path
    folder = Folder(path)
    if which == "best":
        why = "only the run of a federation whose sites validate has one, and none with noise"
        require(folder.best.exists(), f"{path} holds no {folder.best.name}: {why}; take the last round")
    elif not folder.model.exists():
        hint = f": finish the run with {resume_command(folder)}" if folder.begun else ""
        raise UserError(f"{path} holds no {folder.model.name}{hint}")
    return folder.model if which == "last" or not folder.best.exists() else folder.best
