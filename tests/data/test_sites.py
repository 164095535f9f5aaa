"""A folder of sites as the data of a run: the sites are the clients."""

import csv

import numpy as np
import pytest
import small
from PIL import Image
from small import call, metrics_of, strict, summary_of

import fedhassle
from fedhassle.data import catalogue
from fedhassle.data.dataset import hold_out
from fedhassle.data.site.sites import SiteImages
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError
from fedhassle.settings.build import build_dataset, build_split
from fedhassle.settings.hashing import expected_hash, settings_hash

CLASSES = ("benign", "malignant")
WORDS = (
    *("data.holdout=0.25", "rounds=2", "evaluate_every=1", "clients_per_round=3", "threads=1", "device=cpu"),
    *("method.epochs=1", "method.residual_steps=1", "method.batch=8", "net=lenet"),
)


def save(path, k, size=(16, 16), mode="L"):
    """Writes an image that differs from all others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(k).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def sites(tmp_path):
    """Three sites: one with a folder for each class, one with labels.csv, one .npz without labels."""
    folder = tmp_path / "sites"
    for k in range(12):
        save(folder / "north" / CLASSES[k % 2] / f"{k:02}.png", k)
        save(folder / "south" / f"{k:02}.png", 100 + k)
    with (folder / "south" / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *((f"{k:02}.png", CLASSES[k % 2]) for k in range(4))])
    x = np.random.default_rng(0).integers(0, 256, (10, 16, 16), np.uint8)
    np.savez(folder / "east.npz", x=x, y=np.full(10, -1), class_names=np.array(CLASSES))
    return folder


def test_sites_are_the_clients(sites):
    settings = small.resolved(f"data={sites}", *WORDS[1:])
    data = fedhassle.dataset(sites)
    assert data.class_names == CLASSES and data.shape == (1, 16, 16) and data.name == "sites/"
    assert data.x_train.shape == (34, 16, 16, 1) and len(data.y_test) == 0
    made = build_split(settings, data)
    assert made.names == ("east", "north", "south") == data.sites.names
    assert [(a.size, b.size) for a, b in zip(made.labelled, made.unlabelled, strict=True)] == [
        *((0, 10), (12, 0), (4, 8))
    ]
    made.check(data.y_train)
    shown = fedhassle.split(None, {"data": str(sites), "data.holdout": 0.25})
    assert shown.title == "sites/, each site's own images"  # nothing is drawn: there is no α


def test_held_out_images_leave_their_sites(sites):
    """A quarter of each class: 4 of 16 labelled images, from whichever site."""
    settings = small.resolved(f"data={sites}", "data.holdout=0.25", "seed=2")
    data = build_dataset(settings)
    whole = fedhassle.dataset(sites)
    assert len(data.y_test) == 4 and len(data.y_train) == 30
    made = build_split(settings, data)
    for name, labelled, unlabelled in zip(made.names, made.labelled, made.unlabelled, strict=True):
        own = whole.x_train[whole.sites.of == whole.sites.names.index(name)]
        held = {image.tobytes() for image in data.x_train[np.concatenate([labelled, unlabelled])]}
        assert held <= {image.tobytes() for image in own}


def test_a_federation_is_rehearsed_in_a_run(sites, tmp_path, monkeypatch):
    monkeypatch.chdir(sites.parent)
    code, out, _ = call("split", "data=sites", *WORDS, "--json", "--picture", tmp_path / "x.png")
    assert code == 0 and [client["name"] for client in strict(out)["clients"]] == ["east", "north", "south"]
    assert call("run", "data=sites", *WORDS, "--out", "run")[0] == 0
    summary = summary_of(sites.parent / "run")
    assert summary["data"] == "sites/" and summary["settings"]["data"]["name"] == str(sites)
    assert Split.load("run/split.npz").names == ("east", "north", "south")
    assert [line["clients"] for line in metrics_of(sites.parent / "run")] == [
        {"full": 1, "partial": 1, "unlabelled": 1}
    ] * 2
    assert [line["pseudo_label_accuracy"] for line in metrics_of(sites.parent / "run")] == [None, None]
    settings = small.resolved(f"data={sites}", *WORDS)
    assert summary["settings_hash"] == expected_hash(settings)
    small.cut(["data=sites", *WORDS], sites.parent / "cut", 1)
    assert call("resume", "cut")[0] == 0
    small.assert_same_result(sites.parent / "cut", sites.parent / "run")


def test_the_hash_is_of_images_labels_sites_and_names(sites):
    def digest():
        settings = small.resolved(f"data={sites}", *WORDS)
        data = build_dataset(settings)
        found = settings_hash(settings, data, build_split(settings, data))
        assert found == expected_hash(settings)
        return found

    found = [digest()]
    (sites / "north").rename(sites / "west")
    found.append(digest())
    (sites / "west" / "benign" / "00.png").rename(sites / "west" / "malignant" / "00.png")
    found.append(digest())
    (sites / "south" / "11.png").rename(sites / "west" / "benign" / "11.png")
    found.append(digest())
    assert len(set(found)) == 4


def test_size_and_channels_are_those_of_all_files_or_chosen(sites):
    save(sites / "north" / "benign" / "large.png", 50, size=(20, 30), mode="RGB")
    with pytest.raises(UserError, match=r"have 2 sizes \(16×16, 20×30\): choose one with data\.size"):
        build_dataset(small.resolved(f"data={sites}", *WORDS))
    for words, shape in [
        (("data.size=8",), (3, 8, 8)),
        (("data.size=[8, 12]", "data.channels=1"), (1, 8, 12)),
    ]:
        assert build_dataset(small.resolved(f"data={sites}", *WORDS, *words)).shape == shape


def test_skipped_files_are_noted(sites):
    (sites / "south" / "notes.doc").write_text("no image")
    (sites / "README.txt").write_text("not a site")
    settings = small.resolved(f"data={sites}", *WORDS)
    made = build_split(settings, build_dataset(settings))
    assert made.notes == ("south: 1 file skipped, such as notes.doc: not an image file (.doc)",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("split.alpha=0.5",), "sites/ has sites, which are the clients: leave out split.alpha"),
        (("split.clients=3", "split.kind=iid"), "leave out split.kind, split.clients"),
        (("data.size=0",), "data.size must be a side of 1 to 4096"),
        (("data.size=[3]",), "data.size must be"),
        (("data.size=[3, 99999]",), "data.size must be"),
        (("data.size=big",), "data.size"),
        (("data.channels=2",), "data.channels"),
        (("data=fmnist-mini", "data.size=8"), "data.size is for a folder of sites"),
        (("data.holdout=0",), "has no test images"),
    ],
)
def test_settings_that_do_not_fit_sites_are_explained(sites, words, message, tmp_path):
    code, _, err = call("run", f"data={sites}", *WORDS, *words, "--out", tmp_path / "run")
    assert code == 2 and message in " ".join(err.split()) and not (tmp_path / "run").exists()


def as_one_site(sites):
    return sites / "north"


def with_loose_image(sites):
    save(sites / "loose.png", 1)
    return sites


def with_top_labels(sites):
    (sites / "labels.csv").write_text("file,label\n")
    return sites


def with_nothing(sites):
    (sites.parent / "none" / ".hidden").mkdir(parents=True)
    return sites.parent / "none"


def with_an_empty_site(sites):
    (sites / "west").mkdir()
    return sites


def with_two_of_a_name(sites):
    (sites / "east").mkdir()
    return sites


def with_numbers(sites):
    np.savez(sites / "west.npz", x=np.zeros((2, 16, 16), np.uint8), y=np.array([0, 1]))
    return sites


def with_a_wrong_label_file(sites):
    (sites / "south" / "labels.csv").write_text("file,class\n00.png,benign\n")
    return sites


def with_a_damaged_file(sites):
    (sites / "east.npz").write_bytes(b"PK nothing")
    return sites


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_one_site, "have no labels; expected two classes or more.*name the folder above"),
        (with_loose_image, r"holds loose\.png, as the folder of one site does"),
        (with_top_labels, r"holds labels\.csv, as the folder of one site does"),
        (with_nothing, "holds no sites"),
        (with_an_empty_site, "west holds no images"),
        (with_two_of_a_name, "two sites called east"),
        (with_numbers, "west has numbers for classes"),
        (with_a_wrong_label_file, "one column 'label'"),
        (with_a_damaged_file, r"east\.npz: cannot be read"),
    ],
)
def test_mistakes_in_a_folder_are_explained(sites, change, message):
    with pytest.raises(UserError, match=message):
        fedhassle.dataset(change(sites))


def test_a_folder_does_not_hide_a_named_set(tmp_path, monkeypatch):
    (tmp_path / "fmnist-mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert small.resolved("data=fmnist-mini").data.name == "fmnist-mini"
    assert fedhassle.dataset("fmnist-mini").classes == 10


def test_deep_images_and_patients_of_sites(tmp_path):
    """12 bits in 16 give the pixels of the 8-bit originals; held-out patients are in no training image."""
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        for kind in ("eight", "twelve"):
            (tmp_path / kind / name).mkdir(parents=True)
        rows = ["file,label,patient"]
        for k in range(40):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            deep = pixels.astype(np.uint16) * 16 + rng.integers(0, 16, (8, 8), dtype=np.uint16)
            Image.fromarray(pixels).save(tmp_path / "eight" / name / f"{k}.tif")
            Image.fromarray(deep).save(tmp_path / "twelve" / name / f"{k}.tif")
            rows.append(f"{k}.tif,{'' if k % 4 == 3 else 'ab'[k // 4 % 2]},{k // 4}")
        for kind in ("eight", "twelve"):
            (tmp_path / kind / name / "labels.csv").write_text("\n".join(rows))
    eight = catalogue.load(tmp_path / "eight", of_sites=SiteImages(patients="column"))
    deep = SiteImages(patients="column", intensities="12 bits")
    twelve = catalogue.load(tmp_path / "twelve", of_sites=deep)
    assert (eight.x_train == twelve.x_train).all() and twelve.intensities == "12 bits"
    with pytest.raises(UserError, match="keep few of its levels"):
        catalogue.load(tmp_path / "twelve")
    people = twelve.sites.patients
    assert len(np.unique(people)) == 20  # patient 1 of the north is not that of the south
    held = hold_out(twelve, 0.2, seed=3)
    left = {*held.sites.patients}
    assert len(held.y_test) == 12 and (held.y_test >= 0).all() and len(held.y_train) == 64 and len(left) == 16
    where = {image.tobytes(): who for image, who in zip(twelve.x_train, people, strict=True)}
    assert not left & {where[image.tobytes()] for image in held.x_test}
    other = hold_out(twelve, 0.2, seed=4)
    assert {*other.sites.patients} != left
