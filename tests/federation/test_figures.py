"""Each site's own figures: computed at the site, coarse as they leave it, and checked at the server."""

from dataclasses import replace

import numpy as np
import pytest
import small
import torch
from federations import Flying, network, planned, site, terms
from small import metrics_of

from fedhassle.federation.agreement import agreement_hash
from fedhassle.federation.figures import figures_of_site, own_figures, read_figures
from fedhassle.federation.messages import Payload, RefusedError
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.runs.folder import Folder

CLASSES = ("a", "b", "c")


def example(counts=(37, 21, 9)):
    """Probabilities and labels of so many images of each class."""
    rng = np.random.default_rng(1)
    y = rng.permutation(np.repeat(np.arange(3), counts))
    z = rng.normal(size=(len(y), 3)) + 1.5 * np.eye(3)[y]
    return np.exp(z) / np.exp(z).sum(1, keepdims=True), y


def test_figures_are_rates_in_per_cent_of_classes_with_enough_images():
    """Of 37, 21 and 9 images, 9 are too few; counts are rounded down to 32 and 16."""
    p, y = example()
    found = own_figures(p, y, CLASSES, 10)
    said, top = p.argmax(1), p.max(1)
    assert found["recall"] == {
        "a": round(float((said[y == 0] == 0).mean()), 2),
        "b": round(float((said[y == 1] == 1).mean()), 2),
    }
    assert found["images"] == {"a": 32, "b": 16}
    for k, name in enumerate("ab"):  # each pair of an image of the class and another counts
        above = p[y == k, k][:, None] - p[y != k, k][None, :]
        assert found["auroc"][name] == round(float(((above > 0) + 0.5 * (above == 0)).mean()), 2)
    bins = np.clip(np.ceil(top * 15).astype(int), 1, 15)
    gaps = [abs(top[bins == b].sum() - (said == y)[bins == b].sum()) for b in range(1, 16)]
    assert found["ece"] == round(sum(gaps) / len(y), 2) and found["confidence"] == round(float(top.mean()), 2)


def test_behind_a_recall_are_as_many_images_as_its_patients_are_worth():
    """40 images of 10 patients, who are all right or all wrong, tell as much as 10 images do: 8."""
    right = np.repeat([True] * 7 + [False] * 3, 4)
    y = np.repeat([0, 1], [40, 16])
    said = np.append(np.where(right, 0, 1), np.ones(16, int))
    p = 0.9 * np.eye(3)[said] + 0.1 / 3
    patients = np.append(np.repeat(np.arange(10), 4), np.arange(100, 116))
    found = own_figures(p, y, CLASSES, 10, patients)
    assert found["images"] == {"a": 8, "b": 16}
    assert found == {**own_figures(p, y, CLASSES, 10), "images": {"a": 8, "b": 16}}


def test_a_site_with_few_images_reports_nothing_and_one_class_has_no_auroc():
    p, y = example((3, 3, 3))
    assert own_figures(p, y, CLASSES, 10) == {}
    p, y = example((40, 5, 0))
    found = own_figures(p, y, CLASSES, 10)
    assert list(found["recall"]) == ["a"] and found["auroc"] == {}  # only five others


def test_intervals_are_those_of_the_rounded_counts():
    """Wilson's interval of 16 of 20 is 0.584 … 0.919; here of 13 of 16, and of 30 of 32."""
    words = {
        **{"recall": {"b": 0.8, "a": 0.94}, "images": {"b": 16, "a": 32}, "auroc": {"a": 0.9, "b": 0.7}},
        **{"ece": 0.05, "confidence": 0.9},
    }
    found = figures_of_site(read_figures(words, CLASSES, 60), CLASSES)
    z = 1.959963984540054

    def wilson(right, n):
        p = right / n
        half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return [(p + z**2 / (2 * n) - half) / (1 + z**2 / n), (p + z**2 / (2 * n) + half) / (1 + z**2 / n)]

    assert found["auroc"] == pytest.approx(0.8) and list(found["recall"]) == ["a", "b"]
    assert found["recall_95"]["b"] == pytest.approx(wilson(13, 16))
    assert found["recall_95"]["a"] == pytest.approx(wilson(30, 32))
    assert figures_of_site({}, CLASSES) == {}


GOOD = {"recall": {"a": 0.5}, "images": {"a": 16}, "auroc": {}, "ece": 0.1, "confidence": 0.6}


@pytest.mark.parametrize(
    "change",
    [
        {"recall": {"a": 1.5}},
        {"recall": {"x": 0.5}, "images": {"x": 16}},
        {"recall": {}},
        {"images": {"a": 10**12}},
        {"images": {"a": 0}},
        {"auroc": {"a": "high"}},
        {"ece": None},
        {"more": 1},
        {"recall": [0.5]},
    ],
)
def test_figures_that_cannot_be_are_refused(change):
    assert read_figures(GOOD, CLASSES, 30) == GOOD and read_figures(None, CLASSES, 30) == {}
    with pytest.raises(RefusedError):
        read_figures({**GOOD, **change}, CLASSES, 30)


RUN = 'rounds = 1\nevaluate_every = 1\nmethod = {name = "fedavg", batch = 8, epochs = 1}'


def agreed_with(**data):
    agreed = terms(validation=0.6, run=RUN)
    return replace(agreed, data=replace(agreed.data, **data))


def test_figures_leave_a_site_only_if_that_is_agreed(tmp_path):
    agreed = agreed_with()
    transport, sent = network(tmp_path / "sites", agreed), []
    for name in transport.sites:
        transport.behaviour[name, "evaluate"] = lambda answer, payload: (
            sent.append(answer(payload)) or sent[-1]
        )
    list(coordinate(transport, agreed, tmp_path / "run", None, Flying().clock))
    assert {key for answer in sent for key in answer.words} == {"right", "count"}
    assert agreement_hash(agreed) != agreement_hash(agreed_with(class_figures=10))
    (line,) = metrics_of(tmp_path / "run")
    for entry in line["sites"].values():
        assert set(entry) == {"accuracy", "count", "accuracy_95"}
        low, high = entry["accuracy_95"]
        assert low <= entry["accuracy"]["model"] <= high
    card = Folder(tmp_path / "run").card.read_text("utf-8")
    assert "| site | images | accuracy % |" in card and "nobody has verified" in card


def test_each_sites_figures_are_in_metrics_and_on_the_card(tmp_path, caplog):
    """Client 1 has enough of some classes; client 2 sends nonsense, which does not count."""
    agreed = agreed_with(class_figures=10)
    transport = network(tmp_path / "sites", agreed)
    said = {"recall": {"a": 0.91}, "images": {"a": 8}, "auroc": {"a": 0.87}, "ece": 0.12, "confidence": 0.8}
    wrong = {**said, "recall": {"a": 2.0}}
    for name, figures in (("client 1", said), ("client 2", wrong)):
        transport.behaviour[name, "evaluate"] = lambda answer, payload, figures=figures: Payload(
            answer(payload).words | {"figures": figures}
        )
    list(coordinate(transport, agreed, tmp_path / "run", None, Flying().clock))
    (line,) = metrics_of(tmp_path / "run")
    one, two = line["sites"]["client 1"], line["sites"]["client 2"]
    assert (one["recall"], one["class_auroc"], one["ece"]) == ({"a": 0.91}, {"a": 0.87}, 0.12)
    assert "recall" not in two and "the figures of client 2 do not count" in caplog.text
    card = Folder(tmp_path / "run").card.read_text("utf-8")
    row = next(line for line in card.splitlines() if line.startswith("| client 1 |"))
    assert row.endswith("| 0.87 | 0.12 | a 91 |") and "| client 2 |" in card


def test_a_site_computes_its_figures_on_its_validation_images(tmp_path):
    """Enough images of each class, and a model whose probabilities are computed by hand."""
    agreed = agreed_with(class_figures=10)
    data = small.dataset()
    node = site(tmp_path, "one", data.x_train, data.y_train.astype(np.int64), agreed)
    method, plan = planned(agreed)
    vector = method.initial(0)["w"]
    answer = node.answer("evaluate", Payload({**plan, "round": 1}, {"whole w": vector.numpy()})).words
    rows = node.images.now.rows.validation
    pixels = torch.from_numpy((data.x_train[rows] / 255 - 0.5) / 0.25).float().permute(0, 3, 1, 2)
    p = method.net.logits(vector, pixels).softmax(1).detach().numpy()
    assert answer["figures"] == own_figures(p, data.y_train[rows].astype(np.int64), "abcd", 10)
    assert answer["figures"]["recall"]
