"""Export of a trained model as one ONNX file, written only if it predicts the same as PyTorch."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhassle.errors import UserError, first_line, require
from fedhassle.files import atomic
from fedhassle.nets import Net
from fedhassle.predict.model import TrainedModel
from fedhassle.randomness import generator
from fedhassle.version import package_version

OPSET = 17  # old enough for the runtimes of recent years
TRACED, TRIED = 2, (1, 2, 7)  # images in the traced batch, and in the batches of the check
TOLERANCE = 1e-4  # relative to the largest logit, or to 1 if that is larger: the order of sums differs
OUTPUTS = ("probabilities", "logits")


class CalledModules:
    """The module of each call of a network in one prediction, in order; built in the first prediction."""

    def __init__(self) -> None:
        self.made: list[nn.Module] = []
        self.calls = 0


class PlainNet(Net):
    """A network that calls modules with their own weights, as the tracer needs them.

    So the trace contains nothing of the flat vector of weights.
    """

    def __init__(self, net: Net, modules: CalledModules) -> None:
        super().__init__(net.build, net.shape, net.classes, net.width)
        self.modules = modules

    def scaled(self, width: float) -> Net:
        """Returns the same network with another width."""
        return PlainNet(super().scaled(width), self.modules)

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Returns logits (B, M) of the module of this call."""
        if self.modules.calls == len(self.modules.made):
            self.modules.made.append(self.filled(weights, statistics))
        module = self.modules.made[self.modules.calls]
        self.modules.calls += 1
        z: Tensor = module(x)
        return z


class Predictor(nn.Module):
    """The whole model as one module, from uint8 images (N, H, W, C) to probabilities and logits (N, M)."""

    def __init__(self, model: TrainedModel, mode: str) -> None:
        super().__init__()
        self.calls, self.state, self.views, self.mode = CalledModules(), model.state, model.views, mode
        self.method = replace(model.method, net=PlainNet(model.method.net, self.calls))
        with torch.no_grad():
            self(torch.zeros(TRACED, *model.image_size, dtype=torch.uint8))
        self.networks = nn.ModuleList(self.calls.made)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the probabilities and the logits."""
        self.calls.calls = 0
        z = self.method.predict(self.state, self.views.normalise(images))[self.mode]
        return z.softmax(1), z


def export_onnx(model: TrainedModel, path: Path, mode: str) -> float:
    """Writes the file; returns the largest difference of its logits from PyTorch's on random images."""
    require_packages()
    model = model.on("cpu")
    with atomic(path) as temporary:
        try:
            trace(Predictor(model, mode), model.image_size, temporary)
            describe(temporary, metadata(model, mode))
        except OSError:
            raise
        except Exception as error:  # a user's own network may raise anything
            raise UserError(f"the network cannot be written as ONNX: {first_line(error)}") from error
        return largest_difference(temporary, model, mode)


def require_packages() -> None:
    """Raises unless the packages for the export are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        needs = f"{error.name}, which is not installed" if error.name else f"more than works here ({error})"
        message = f"the export needs {needs}: pip install 'fedhassle[export]'"
        raise UserError(message) from error


def trace(predictor: nn.Module, image_size: tuple[int, int, int], path: Path) -> None:
    """Writes the graph of a module for batches of any size."""
    with warnings.catch_warnings():
        # The tracer is deprecated, but needs no further package. It warns of values that are constant in the
        # trace; the check finds those.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            predictor.eval(),
            (torch.zeros(TRACED, *image_size, dtype=torch.uint8),),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "N"} for name in ("images", *OUTPUTS)},
        )


def describe(path: Path, properties: dict[str, str]) -> None:
    """Adds metadata to a file, and checks the file."""
    import onnx

    made = onnx.load(path)
    made.producer_name, made.producer_version = "fedhassle", package_version()
    onnx.helper.set_model_props(made, properties)
    onnx.checker.check_model(made, full_check=True)
    onnx.save(made, path)


def metadata(model: TrainedModel, mode: str) -> dict[str, str]:
    """Returns the metadata of a model; lists are JSON."""
    height, width, channels = model.image_size
    colours = "grey" if channels == 1 else "RGB"
    return {
        "class_names": json.dumps(model.class_names, ensure_ascii=False),
        "input": f"images: uint8 (N, {height}, {width}, {channels}), {colours}, 0 … 255; normalised inside",
        "output": "probabilities (N, M) and logits (N, M), classes in the order of class_names",
        "mean": json.dumps(model.about["mean"]),
        "std": json.dumps(model.about["std"]),
        "method": str(model.about["method"]["name"]),
        "mode": mode,
        "intensities": model.intensities.text,
        "fedhassle": package_version(),
    }


def largest_difference(path: Path, model: TrainedModel, mode: str) -> float:
    """Returns the largest difference of a file's logits from the model's; too large a one is an error."""
    gaps = []
    try:
        run = session(path)
        for count in TRIED:
            rng = generator("export", count)
            images = rng.integers(0, 256, (count, *model.image_size), dtype=np.uint8)
            z = model.logits(images)[mode]
            probabilities, found = run(images)
            if found.shape != tuple(z.shape):
                raise ValueError(f"it gives {found.shape} for {tuple(z.shape)}")
            gap = np.abs(found - z.numpy()).max() / max(1.0, float(z.abs().max()))
            gaps += [float(gap), float(np.abs(probabilities - z.softmax(1).numpy()).max())]
    except Exception as error:  # onnxruntime has its own kinds
        raise UserError(f"the exported model does not run, nothing is written: {error}") from error
    worst = float(np.max(gaps))
    require(worst <= TOLERANCE, f"the exported model differs from PyTorch by {worst:.2g}: nothing is written")
    return worst


def session(path: Path) -> Any:
    """Returns a function from images to probabilities and logits, by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised anyway
    opened = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    quiet = onnxruntime.RunOptions()
    quiet.log_severity_level = 4
    return lambda images: opened.run(list(OUTPUTS), {"images": images}, quiet)
