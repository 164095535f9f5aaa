"""Labels that come later: a node notices them, the server counts them, and the run goes on."""

import os

import numpy as np
import pytest
import small
from federations import ENGINE, FEW, FakeTransport, Flying, held, planned, terms
from PIL import Image

from fedhassle.data.site.patients import parsed_patients
from fedhassle.data.site.validation import partition
from fedhassle.federation.messages import Introduction, Payload, RefusedError, recounted
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.federation.server.follow import ReadPosition, followed
from fedhassle.federation.server.sites import Sites
from fedhassle.federation.site.new_labels import LabelSource, LabelWatch
from fedhassle.federation.site.node import SiteNode
from fedhassle.files import json_lines
from fedhassle.method import Client
from fedhassle.runs.folder import Folder

RUN = """
        rounds = 4
        evaluate_every = 1
        method = {name = "hassle", batch = 8, epochs = 1, residual_steps = 1}
"""
AGREED = terms(validation=0.3, run=RUN)
LATE = "client 3"  # its labels come later


# The file


@pytest.fixture
def watch(tmp_path):
    """A watch on a folder of four images without a label file, and a function that writes the file."""
    for k in range(4):
        Image.fromarray(np.full((8, 8), k, np.uint8)).save(tmp_path / f"{k}.png")
    source = LabelSource(tmp_path, None, ("benign", "malignant"))
    made, clock = (
        LabelWatch(source, [f"{k}.png" for k in range(4)], source.stamp(), lambda: 1e6),
        iter(range(9)),
    )

    def write(text, when=None):
        (tmp_path / "labels.csv").write_text(text)
        os.utime(tmp_path / "labels.csv", (0, 1000 + next(clock) if when is None else when))

    return made, write


def test_new_rows_are_noticed_once(watch):
    made, write = watch
    assert made.changed() is None
    write("file,label\n1.png,benign\n")
    assert made.changed().tolist() == [-1, 0, -1, -1] and made.changed() is None
    write("file,label\n1.png,benign\n3.png,malignant\n0.png,\n")
    assert made.changed().tolist() == [-1, 0, -1, 1] and made.changed() is None


def test_a_file_that_is_still_being_written_waits(watch):
    made, write = watch
    write("file,label\n1.png,benign\n", 1e6 - 1)
    assert made.changed() is None
    write("file,label\n1.png,benign\n", 1e6 - 5)
    assert made.changed().tolist() == [-1, 0, -1, -1]


def test_a_mistake_in_the_file_is_logged_once_and_nothing_changes(watch, caplog):
    made, write = watch
    write("file,label\n1.png,benine\n")
    assert made.changed() is None and made.changed() is None
    assert caplog.text.count("'benine' is not one of the classes") == 1 and "stay in use" in caplog.text
    write("file,label\n1.png,benign\n")
    assert made.changed().tolist() == [-1, 0, -1, -1]


def test_labels_stay_while_the_folder_cannot_be_read(watch, monkeypatch, caplog):
    """The images are in memory: a network drive that is gone for a while costs no round."""
    made, write = watch

    def stale(path):
        raise OSError(116, "Stale file handle", str(path))

    with monkeypatch.context() as gone:
        gone.setattr(type(made.source.images), "is_dir", stale)
        assert made.changed() is None and "Stale file handle" in caplog.text
    write("file,label\n1.png,benign\n")
    assert made.changed().tolist() == [-1, 0, -1, -1]


def test_images_that_come_later_wait_for_a_restart(watch, caplog):
    made, write = watch
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(made.source.images / "new.png")
    write("file,label\n1.png,benign\nnew.png,benign\ngone.png,benign\n")
    with caplog.at_level("INFO", "fedhassle"):
        assert made.changed().tolist() == [-1, 0, -1, -1]
    assert "1 images are not used" in caplog.text and "gone.png" in caplog.text


@pytest.mark.parametrize("rule", ["column", "dicom"])
def test_labels_without_a_patient_are_a_mistake_as_at_the_start(watch, rule, caplog):
    """Otherwise the node would train on them, and not start again. Of DICOM files the headers count."""
    made, write = watch
    source = made.source._replace(patients=parsed_patients(rule))
    patients = np.array([0, 7, 0, 0], np.uint64)  # of one file the header names it
    made = LabelWatch(source, made.files, source.stamp(), made.now, patients)
    write("file,label\n2.png,benign\n")
    assert made.changed() is None and "the patient of 2.png is not known" in caplog.text
    write("file,label\n1.png,benign\n")
    found = made.changed()
    assert found is None if rule == "column" else found.tolist() == [-1, 0, -1, -1]
    write("file,label,patient\n1.png,benign,A\n2.png,benign,A\n")
    assert made.changed().tolist() == [-1, 0, 0, -1]


def test_an_npz_has_its_labels_for_good(tmp_path):
    np.savez(tmp_path / "site.npz", x=np.zeros((2, 8, 8), np.uint8), y=[0, 1])
    source = LabelSource(tmp_path / "site.npz", None, ("a", "b"))
    assert LabelWatch(source, ["site.npz[0]", "site.npz[1]"], source.stamp()).changed() is None


# The counts


SAID = Introduction(Client("north", 40, 50), 10, "abc", {})


def counts(labelled, unlabelled, validation):
    return {"labelled": labelled, "unlabelled": unlabelled, "validation": validation}


def test_labels_move_images_from_one_use_to_another():
    new = recounted(SAID, counts(80, 12, 8), False, 100)
    assert new.client == Client("north", 80, 12) and new.validation == 8
    assert new._replace(client=SAID.client, validation=10) == SAID
    withdrawn = recounted(SAID, counts(0, 90, 0), False, 100)  # labels, and so those of validation
    assert withdrawn.client == Client("north", 0, 90)
    assert recounted(withdrawn, counts(40, 50, 10), False, 100) == SAID
    assert recounted(SAID, counts(128, 64, 8), True, 100).client == Client("north", 128, 64)


def test_coarse_counts_double_once_not_with_each_announcement():
    doubled = recounted(SAID, counts(128, 64, 8), True, 100)
    with pytest.raises(RefusedError, match="joined with 100 images"):
        recounted(doubled, counts(256, 128, 16), True, 100)


@pytest.mark.parametrize(
    ("words", "coarse", "why"),
    [
        (counts(10**12, 0, 0), False, "joined with 100 images, and with its new labels it counts 1,000,000"),
        (counts(50, 41, 10), False, "must be restarted"),
        (counts(128, 64, 16), True, "joined with 100 images"),
        (counts(256, 0, 8), True, "joined with 100 images"),
        (counts(-1, 91, 10), False, "count of labelled samples is -1"),
        (counts(True, 89, 10), False, "count of labelled samples is True"),
        ({"labelled": 100}, False, "its new counts are"),
        ([40, 50, 10], False, "its new counts are"),
    ],
)
def test_new_labels_cannot_bring_new_images(words, coarse, why):
    with pytest.raises(RefusedError, match=why):
        recounted(SAID, words, coarse, 100)


# A run


def nodes(folder, new=None, agreed=AGREED):
    """Three sites; the last has no labels until `new`, a list, holds them."""
    made, truth = {}, held(small.dataset(), FEW)
    for name, (x, y) in truth.items():
        late, source = name == LATE, (lambda: new.pop() if new else None)
        known = np.full_like(y, -1) if late else y
        made[name] = SiteNode(name, agreed, x, known, folder / name, ENGINE, source if late else lambda: None)
    return made, truth[LATE][1]


def test_new_labels_are_counted_between_rounds_and_the_run_goes_on(tmp_path):
    """Server and site go by the same counts in each round: the old in round 2, the new in round 3."""
    new = []
    sites, y = nodes(tmp_path / "sites", new)
    transport, folder = FakeTransport({k: node.answer for k, node in sites.items()}), Folder(tmp_path / "run")
    before = len(y)
    steps = []
    for step in coordinate(transport, AGREED, folder.path, None, Flying().clock):
        steps.append(step)
        if step.t == 1:
            new.append(y)
    assert [len(step.clients) for step in steps] == [3] * 4
    clients = [next(client for client in step.clients if client.name == LATE) for step in steps]
    site = sites[LATE]
    now = Client(LATE, len(site.images.now.rows.labelled), len(site.images.now.rows.unlabelled))
    assert clients == [Client(LATE, 0, before)] * 2 + [now] * 2 and now.labelled
    trained = {
        request.payload.words["round"]: request.payload.words["counts"]["labelled"]
        for request in transport.requests
        if request.kind == "train" and request.node == transport.ids[LATE]
    }
    assert trained == {1: 0, 2: 0, 3: now.labelled, 4: now.labelled}
    (event,) = [e for e in json_lines(folder.audit) if e["event"] == "relabelled"]
    after = counts(now.labelled, now.unlabelled, len(site.images.now.rows.validation))
    assert {key: event[key] for key in after} == after and event["site"] == LATE
    assert sum(after.values()) == before
    assert list(followed(folder, ReadPosition(), lambda: True)) == steps
    assert small.summary_of(folder.path)["sites"][LATE]["labelled"] == now.labelled
    assert not any(
        LATE in line["sites"] for line in small.metrics_of(folder.path)
    )  # it may have trained on all


def test_a_site_trains_with_new_labels_as_one_that_started_with_them(tmp_path):
    """The same message gives the same bits, after the change and at a site that began with these labels."""
    new, agreed = [], terms(run='method = {name = "fedavg", batch = 8, epochs = 1}')
    (sites, y), (x, _) = nodes(tmp_path / "a", new, agreed), held(small.dataset(), FEW)[LATE]
    changed, fresh = sites[LATE], SiteNode(LATE, agreed, x, y, tmp_path / "b", ENGINE)
    introduced = changed.answer("query", Payload({})).words
    new.append(y)
    told = changed.answer("evaluate", Payload({"counts": counts(0, len(y), 0)})).words["labels"]
    expected = fresh.answer("query", Payload({})).words
    assert told == {key: expected[key] for key in told} and introduced["labelled"] == 0
    plan = {**planned(agreed)[1], "round": 1, "since": 0}
    start = small.net().initial(0).numpy()
    message = Payload({**plan, "counts": told}, {"whole w": start})
    mine, other = (node.answer("train", message) for node in (changed, fresh))
    assert mine.words == other.words and "labels" not in mine.words and mine.arrays.keys() == {"whole w"}
    assert (mine.arrays["whole w"] == other.arrays["whole w"]).all()


@pytest.mark.parametrize("patients", [None, np.arange(1, 10**4, dtype=np.uint64) // 3 + 1])
def test_a_run_validates_on_the_images_that_it_began_with_after_a_restart_too(patients, tmp_path):
    """With more labels the draw would take images that the run has trained on; the next run draws anew."""
    agreed, (x, y) = terms(validation=0.3), held(small.dataset(), FEW)["client 2"]
    owners = None if patients is None else patients[: len(y)]
    truth, few = np.arange(len(y)) % 4, np.where(np.arange(len(y)) % 2, np.arange(len(y)) % 4, -1)

    def begun(labels, run):
        node = SiteNode("north", agreed, x, labels, tmp_path, ENGINE, patients=owners)
        told = node.answer("query", Payload({"run": run})).words
        assert [told[key] for key in ("labelled", "unlabelled", "validation")] == [
            *map(len, node.images.now.rows)
        ]
        return node.images.now.rows

    first, again, other = begun(few, "one"), begun(truth, "one"), begun(truth, "two")
    assert again.validation.tolist() == first.validation.tolist() and len(first.validation)
    assert not {*again.labelled} & {*first.validation} and len(again.labelled) > len(first.labelled)
    fresh = partition(x, truth, 0.3, owners)
    assert [rows.tolist() for rows in other] == [rows.tolist() for rows in fresh]
    assert other.validation.tolist() != first.validation.tolist()
    if owners is not None:
        assert not {*owners[again.labelled]} & {*owners[again.validation]}


def test_new_labels_of_unknown_patients_wait_for_a_restart(tmp_path, caplog):
    """Their patients may be patients of validation."""
    x, y = held(small.dataset(), FEW)[LATE]
    before, new = np.full_like(y, -1), [np.zeros_like(y)]
    patients = np.arange(len(y), dtype=np.uint64)  # the first is unknown
    node = SiteNode(LATE, terms(), x, before, tmp_path, ENGINE, lambda: new.pop() if new else None, patients)
    told = node.answer("evaluate", Payload({"counts": counts(0, len(y), 0)})).words["labels"]
    assert told == counts(len(y) - 1, 1, 0) and "1 new labels are not used" in caplog.text


def test_counts_that_a_site_invents_are_refused_and_the_run_goes_on(tmp_path):
    sites, y = nodes(tmp_path / "sites")
    transport, folder = FakeTransport({k: node.answer for k, node in sites.items()}), Folder(tmp_path / "run")
    transport.behaviour[LATE, "train"] = lambda answer, payload: (said := answer(payload))._replace(
        words={**said.words, "labels": counts(10**12, 0, 0)}
    )
    steps = list(coordinate(transport, AGREED, folder.path, None, Flying().clock))
    assert {client for step in steps for client in step.clients if client.name == LATE} == {
        Client(LATE, 0, len(y))
    }
    failed = [e for e in json_lines(folder.audit) if e["event"] == "failed"]
    assert failed and all("new labels: it joined with" in event["why"] for event in failed)


def test_a_worker_restarted_with_new_labels_announces_them(tmp_path):
    """Its node stays connected, so that nobody asks it to introduce itself: it sits out one round."""
    sites, y = nodes(tmp_path / "sites")
    transport, folder = FakeTransport({k: node.answer for k, node in sites.items()}), Folder(tmp_path / "run")
    steps = []
    for step in coordinate(transport, AGREED, folder.path, None, Flying().clock):
        steps.append(step)
        if step.t == 1:
            x = sites[LATE].images.now.dataset.x_train
            transport.sites[LATE] = SiteNode(LATE, AGREED, x, y, tmp_path / "again", ENGINE).answer
    names = [{client.name for client in step.clients} for step in steps]
    assert [LATE in names_of for names_of in names] == [True, False, True, True]
    (failed, *_) = [e for e in json_lines(folder.audit) if e["event"] == "failed"]
    assert failed["why"].startswith("its labels have changed") and failed["round"] == 2


def test_new_labels_keep_the_rules_on_counts(tmp_path):
    """A site that has the most images of both kinds cannot label them all."""
    most = max(len(y) for _, y in held(small.dataset(), FEW).values())
    agreed = terms(run=RUN, most_images=most)
    sites, _ = nodes(tmp_path / "sites", agreed=agreed)
    transport = FakeTransport({k: node.answer for k, node in sites.items()})
    made = Sites(transport, agreed, Audit(tmp_path / "audit.jsonl"), Flying().clock)
    made.gather(3)
    big = made.joined[LATE].introduction._replace(client=Client(LATE, most, most))
    made.joined[LATE] = made.joined[LATE]._replace(introduction=big, images=2 * most)
    made._announced[LATE] = counts(2 * most, 0, 0)
    made.refresh()
    assert made.joined[LATE].introduction == big
    (event,) = [e for e in json_lines(tmp_path / "audit.jsonl") if e["event"] == "failed"]
    assert "most_images" in event["why"]
