"""Small experiments, and made-up results for the cells of others, as a ledger holds them."""

import dataclasses
import json

from fedhassle.settings.request import Request
from fedhassle.settings.schema import resolve

KINDS = {"full": 1e6, "partial": 2e6, "unlabelled": 3e6}

FEW = """
[settings]
data = "IMAGES"
rounds = 4
evaluate_every = 1
clients_per_round = 4
threads = 1
device = "cpu"
split.clients = 6
split.labels = { full = 1, partial = 2, unlabelled = 3, share = 0.3 }
method.epochs = 1
method.batch = 16
"""  # settings with which a run takes a fraction of a second


def experiment(folder, text, images):
    """The file of an experiment on the images of a file."""
    path = folder / "tiny.toml"
    path.write_text(text.replace("IMAGES", str(images)))
    return path


def summary(cell, scores, rounds=None, **changes):
    """The summary of a cell's run; `scores`: final accuracies, that of the headline last.

    A run that keeps running means also has each prediction by them, two points higher.
    """
    if rounds is not None:
        layers = (*cell.requested.layers, {"rounds": rounds})
        cell = dataclasses.replace(cell, requested=Request(layers))
    run, headline = cell.identity, list(scores)[-1]
    if resolve(cell.requested).method.settings.get("average") is not None:
        scores = {**scores, **{f"{name} averaged": score + 0.02 for name, score in scores.items()}}
    steps = sorted({max(run.rounds // 2, 1), run.rounds})
    history = [
        {
            "round": t,
            "accuracy": {name: score * (0.5 if t < run.rounds else 1) for name, score in scores.items()},
            "loss": {"w_S": 2.0 / t, "w_U": 3.0 / t},
            **{"bytes_up": KINDS, "bytes_down": KINDS, "clients": dict.fromkeys(KINDS, 1), "seconds": 30.0},
        }
        for t in steps
    ]
    return {
        **{"format": 1, "method": run.method, "data": run.data, "seed": cell.seed, "settings": {}},
        **{"settings_hash": run.settings_hash, "rounds": run.rounds, "headline": headline},
        "accuracy": {
            name: {"last": score, "best": 1.0, "mean_of_last": score} for name, score in scores.items()
        },
        "versions": {"fedhassle": "9.9", "torch": "8.8"},
        "hardware": {"gpu": "Some <GPU> & co", "cpu": "a", "threads": 2},
        **{"seconds": 60.0, "history": history},
        **changes,
    }


def put(folder, *summaries):
    """Writes summaries into a ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in summaries:
        path = folder / f"{one['settings_hash']}-{one['seed']}.json"
        path.write_text(json.dumps(one), "utf-8")


def hassle(em, um=None, sm=None):
    """The scores of HASSLE, in steps of a hundredth unless they are given."""
    return {"SM": em - 0.02 if sm is None else sm, "UM": em - 0.01 if um is None else um, "EM": em}
