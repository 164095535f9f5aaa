"""Setting a federation up: init, certificate, join, admit and expel, as commands."""

import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small
from PIL import Image

pytest.importorskip("cryptography")

from fedhassle.errors import UserError
from fedhassle.federation.agreement import agreement_hash, read_agreement, run_request
from fedhassle.federation.setup import keys
from fedhassle.federation.setup.admission import admit_site, admitted, expel_site
from fedhassle.federation.setup.folder import FederationFolder, federation_folder
from fedhassle.settings.schema import resolve

call = partial(small.call, "federation")  # exit code, output and error output of its commands


def init(out, *words, address="127.0.0.1:8443"):
    return call("init", "--address", address, "--out", out, *words)


@pytest.fixture(scope="module")
def created(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coordinator") / "federation"
    code, out, err = init(
        *(folder, "method=fedavg", "rounds=3", "method.epochs=2", "--name", "Zoo"),
        *("--classes", "cat, dog", "--size", "12x14", "--channels", 1, "--also", "fl.example.org"),
    )
    assert (code, err) == (0, "")
    return folder, out


@pytest.fixture
def coordinator(created, tmp_path):
    """A federation's folder of this test's own."""
    return shutil.copytree(created[0], tmp_path / "coordinator")


@pytest.fixture
def site(created, tmp_path):
    """A site's files from the coordinator, and its images."""
    given = tmp_path / "given"
    given.mkdir()
    for name in ("federation.toml", "ca.crt"):
        shutil.copy(created[0] / name, given)
    for name in ("cat/1.png", "dog/2.png", "unlabelled/3.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        Image.fromarray(np.zeros((12, 14), np.uint8)).save(tmp_path / "images" / name)
    return given, tmp_path / "images"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# init


def test_init_writes_the_file_and_the_certificates(created):
    folder, out = created
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"federation.toml", "ca.crt", "server.crt", "private/ca.key", "private/server.key"}
    assert mode(folder / "private") == 0o700
    assert {mode(path) for path in (folder / "private").iterdir()} == {0o600}
    found = read_agreement(folder)
    assert (found.name, found.address) == ("Zoo", "127.0.0.1:8443")
    assert found.data.class_names == ("cat", "dog")
    assert (found.data.height, found.data.width, found.data.channels) == (12, 14, 1)
    assert (found.data.mean, found.data.std, found.data.flip, found.data.crop) == ((0.0,), (1.0,), True, 1)
    assert found.run == {
        "method": {"name": "fedavg", "epochs": 2},
        **{"net": "lenet", "rounds": 3, "evaluate_every": 2, "seed": 0},
    }
    assert resolve(run_request(found)).method.settings["epochs"] == 2
    assert agreement_hash(found) in out and keys.certificate_fingerprint(folder / "ca.crt") in out
    assert "PRIVATE" not in out
    assert [path.name for path in folder.parent.iterdir()] == ["federation"]


def trusted(folder, ca, name):
    """A handshake over a pair of sockets, with the files that sites have."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder.certificate, folder.server_key)
    here, there = socket.socketpair()
    thread = threading.Thread(target=lambda: server.wrap_socket(there, server_side=True).close())
    thread.start()
    with here, ssl.create_default_context(cafile=ca).wrap_socket(here, server_hostname=name) as safe:
        found = safe.version() in ("TLSv1.2", "TLSv1.3")
    thread.join(small.LIMIT)
    return found


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "fl.example.org"])
def test_the_server_is_trusted_by_each_of_its_names(created, name):
    assert trusted(FederationFolder(created[0]), created[0] / "ca.crt", name)


def test_init_like_a_data_set(tmp_path):
    assert init(tmp_path / "a", "--like", "cifar10")[0] == 0
    found = read_agreement(tmp_path / "a")
    assert len(found.data.class_names) == 10 and found.data.form.channels == 3
    assert (found.data.mean, found.data.crop) == ((0.4914, 0.4822, 0.4465), 4)
    assert (found.run["method"], found.run["net"], found.run["rounds"]) == (
        {"name": "hassle"},
        "resnet8",
        200,
    )
    assert init(tmp_path / "b", "--like", "cifar10", "--channels", 1, "--size", 16, "--no-flip")[0] == 0
    other = read_agreement(tmp_path / "b").data
    assert other.class_names == found.data.class_names
    assert (other.height, other.width, other.mean, other.crop, other.flip) == (16, 16, (0.0,), 2, False)


def test_init_from_a_folder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 200, (4, 12, 14), np.uint8)
    for k, name in enumerate(("cat/1.png", "cat/2.png", "dog/3.png", "unlabelled/4.png")):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[k]).save(tmp_path / "images" / name)
    words = ("--from-folder", tmp_path / "images")
    assert init(tmp_path / "a", *words)[0] == 0
    found = read_agreement(tmp_path / "a").data
    assert found.form.class_names == ("cat", "dog") and (found.height, found.width) == (12, 14)
    assert found.channels == 1
    assert found.mean == (round(float((pixels / 255).mean()), 4),)
    assert found.std == (round(float((pixels / 255).std()), 4),)
    Image.new("RGB", (20, 20)).save(tmp_path / "images" / "5.png")
    code, _, err = init(tmp_path / "b", *words)
    assert code == 2 and "2 sizes" in err and "--size" in err
    assert init(tmp_path / "b", *words, "--size", 16)[0] == 0
    assert read_agreement(tmp_path / "b").data.form.channels == 3


def test_init_notes_classes_that_may_be_none(tmp_path):
    for k in range(3):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("L", (16, 16)).save(tmp_path / "images" / f"{k}.png")
    (tmp_path / "images" / "labels.csv").write_text("file,label\n0.png,cat\n1.png,Cat\n2.png,N/A\n")
    code, out, _ = init(tmp_path / "a", "--from-folder", tmp_path / "images")
    assert code == 0 and "note: looks like a missing label: 'N/A'" in out and "'Cat' and 'cat' differ" in out
    words = ("--classes", "cat,dog", "--size", "16")
    assert "note: if a patient has several images, choose --patients" in init(tmp_path / "b", *words)[1]
    assert "note: " not in init(tmp_path / "c", *words, "--patients", "folder 2")[1]
    assert read_agreement(tmp_path / "c").data.patients == "folder 2"


CLASSES = ("--classes", "a,b", "--size", "8")
BAD = {
    "nothing given": ((), "--from-folder"),
    "two ways": ((*CLASSES, "--like", "fmnist"), "one of --classes"),
    "no size": (("--classes", "a,b"), "--classes needs --size"),
    "no such size": (("--classes", "a,b", "--size", "8by8"), "got '8by8'"),
    "no pixels": (("--classes", "a,b", "--size", "0"), "data.height: "),
    "one class": (("--classes", "a", "--size", "8"), "data.class_names: "),
    "a class without a name": (("--classes", "a,,b", "--size", "8"), "data.class_names: ''"),
    "two channels": ((*CLASSES, "--channels", "2"), "--channels must be 1"),
    "no such data set": (("--like", "fmist"), "did you mean 'fmnist'?"),
    "no folder": (("--from-folder", "nowhere"), "nowhere does not exist"),
    "labels of nothing": ((*CLASSES, "--labels", "x.csv"), "--labels needs --from-folder"),
    "no such setting": ((*CLASSES, "round=3"), "did you mean 'rounds'?"),
    "all data in one place": ((*CLASSES, "method=central"), "'central' needs all data in one place"),
    "no such method": ((*CLASSES, "method=fedavgg"), "did you mean 'fedavg'?"),
    "no such network": ((*CLASSES, "net=resnet9"), "unknown network 'resnet9', did you mean 'resnet8'?"),
    "images too small": (
        ("--classes", "a,b", "--size", "3", "--channels", "1"),
        "net 'lenet' cannot be built",
    ),
    "a value of the method": ((*CLASSES, "method.batch=0"), "method.batch"),
    "a setting of the simulator": ((*CLASSES, "split.alpha=1"), "run.split is for simulated runs"),
    "no setting": ((*CLASSES, "fedavg"), "KEY=VALUE"),
    "no other name": ((*CLASSES, "--also", "a b"), "neither a host name nor an IP address"),
    "too large a crop": ((*CLASSES, "--crop", "8"), "data.crop"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_federation_that_cannot_be_created_leaves_nothing_behind(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    words, message = BAD[case]
    code, out, err = init("federation", *words)
    assert code == 2 and message in err and out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["host", "0.0.0.0:8443", "ho st:1", "a..b:8443"])
def test_a_wrong_address_leaves_nothing_behind(tmp_path, address):
    code, _, err = init(tmp_path / "x", *CLASSES, address=address)
    assert code == 2 and err and list(tmp_path.iterdir()) == []


def test_a_federation_is_never_overwritten(coordinator):
    before = {path: path.read_bytes() for path in coordinator.rglob("*") if path.is_file()}
    code, _, err = init(coordinator, *CLASSES)
    assert code == 2 and "not empty" in err
    assert {path: path.read_bytes() for path in coordinator.rglob("*") if path.is_file()} == before


def test_an_empty_working_folder_becomes_the_federation(tmp_path, monkeypatch):
    """It is the same folder afterwards: a shell that is in it would otherwise be in a deleted one."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    before = Path.cwd().stat().st_ino
    code, out, err = init(".", *CLASSES)
    assert (code, err) == (0, "") and "for every site   federation.toml  ca.crt" in out
    assert (tmp_path / "mine").stat().st_ino == before and [path.name for path in tmp_path.iterdir()] == [
        "mine"
    ]
    files = {path.relative_to(Path()).as_posix() for path in Path().rglob("*") if path.is_file()}
    assert files == {"federation.toml", "ca.crt", "server.crt", "private/ca.key", "private/server.key"}
    assert mode(Path("private")) == 0o700 and read_agreement(Path()).data.class_names == ("a", "b")


def test_a_folder_that_cannot_be_written_is_a_user_error_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    code, out, err = init(tmp_path / "link", *CLASSES)
    assert (code, out) == (2, "") and f"{tmp_path / 'link'} cannot be written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


# certificate


def server_files(folder):
    """The server's certificates and keys, old and new, by name."""
    found = (*folder.glob("server.crt*"), *(folder / "private").glob("server.key*"))
    return {path.name: path.read_bytes() for path in found}


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "::1", "fl.example.org", "new.example.org", "third.example.org"]
)
def test_sites_trust_a_new_certificate_by_its_old_and_new_names(created, coordinator, name):
    """With the authority that they have; the address has changed to a name that was never named."""
    file = coordinator / "federation.toml"
    file.write_text(file.read_text().replace("127.0.0.1:8443", "new.example.org:443"))
    before = server_files(coordinator)
    code, out, err = call("certificate", coordinator, "--also", "third.example.org")
    assert (code, err) == (0, "")
    assert trusted(FederationFolder(coordinator), created[0] / "ca.crt", name)
    after = server_files(coordinator)
    assert {path: after[f"{path}.old1"] for path in before} == before and len(after) == 4
    assert not set(before.values()) & {after[path] for path in before}
    names = "new.example.org, third.example.org, 127.0.0.1, fl.example.org, localhost, ::1"
    assert f"for {names} old" in " ".join(out.split()) and "sites need nothing new" in out
    year = keys.read_certificate(coordinator / "ca.crt").not_valid_after_utc.year
    assert f"to {year}-" in out and "server.key.old1" in out
    assert {mode(path) for path in (coordinator / "private").iterdir()} == {0o600}
    assert mode(coordinator) == mode(created[0]) and not list(coordinator.glob(".writing-*"))


def test_no_old_certificate_is_lost(coordinator):
    """Neither by a second renewal, nor if a part of the first is missing."""
    first = server_files(coordinator)
    assert call("certificate", coordinator)[0] == 0
    second = server_files(coordinator)
    (coordinator / "server.crt.old1").unlink()
    assert call("certificate", coordinator)[0] == 0
    last = server_files(coordinator)
    assert last["server.key.old1"] == first["server.key"]
    for name in ("server.crt", "server.key"):
        assert last[f"{name}.old2"] == second[name] != last[name]
    for name in ("server.crt", "private/server.key"):
        (coordinator / name).unlink()
    code, out, _ = call("certificate", coordinator, "--also", "fl.example.org")
    assert code == 0 and "old none" in " ".join(out.split())
    assert trusted(FederationFolder(coordinator), coordinator / "ca.crt", "fl.example.org")


def replaced_authority(folder, **more):
    for name in ("private/ca.key", "ca.crt"):
        (folder / name).unlink()
    keys.make_ca(folder / "private" / "ca.key", folder / "ca.crt", "Zoo", **more)


TEN_YEARS_AGO = datetime.now(UTC) - timedelta(days=3651)
NOT_RENEWED = {
    "no key of the authority": (
        lambda folder: (folder / "private" / "ca.key").unlink(),
        (),
        "ca.key, the key of the federation's authority, is missing",
    ),
    "no authority": (lambda folder: (folder / "ca.crt").unlink(), (), "ca.crt cannot be read"),
    "an authority that has expired": (
        lambda folder: replaced_authority(folder, start=TEN_YEARS_AGO),
        (),
        "has expired (valid from 20",
    ),
    "a damaged certificate": (
        lambda folder: (folder / "server.crt").write_text("x"),
        (),
        "server.crt is not a certificate",
    ),
    "no name": (lambda folder: None, ("--also", "a b"), "neither a host name nor an IP address"),
}


@pytest.mark.parametrize("case", NOT_RENEWED)
def test_a_certificate_that_cannot_be_made_leaves_the_old_one(coordinator, case):
    change, words, message = NOT_RENEWED[case]
    change(coordinator)
    before = {path: path.read_bytes() for path in coordinator.rglob("*") if path.is_file()}
    code, out, err = call("certificate", coordinator, *words)
    assert code == 2 and message in " ".join(err.split()) and out == ""
    assert {path: path.read_bytes() for path in coordinator.rglob("*") if path.is_file()} == before


# join


def test_join_makes_a_key_and_shows_what_to_send(site, created):
    given, images = site
    words = ("join", given, "--name", "north", "--data", images)
    code, out, err = call(*words, "--hash", agreement_hash(read_agreement(created[0])))
    assert (code, err) == (0, "")
    folder = FederationFolder(given)
    assert mode(folder.private) == 0o700 and mode(folder.site_key("north")) == 0o600
    line = (given / "north.pub").read_text().strip()
    assert line == keys.public_line(folder.site_key("north"), "north") and line in out
    assert "3 images, 2 labelled (67%)" in out and "PRIVATE KEY" not in out
    assert keys.certificate_fingerprint(created[0] / "ca.crt") in out
    key = folder.site_key("north").read_bytes()
    (given / "north.pub").unlink()
    code, out, _ = call("join", given / "federation.toml", "--name", "north", "--data", images)
    assert code == 0 and "kept the private key" in out
    assert folder.site_key("north").read_bytes() == key and (given / "north.pub").read_text().strip() == line


JOINS = {
    "another agreement": (
        lambda *_: ("--hash", "0123"),
        "ask the coordinator for the current federation.toml",
    ),
    "no such name": (lambda *_: ("--name", "../x"), "'../x' cannot name a site"),
    "the authority's name": (lambda *_: ("--name", "ca"), "'ca' is reserved"),
    "the server's name": (lambda *_: ("--name", "Server"), "'Server' is reserved"),
    "no images": (lambda given, _: ("--data", given / "none"), "none does not exist"),
    "a wrong class": (
        lambda _, images: (images / "cat").rename(images / "cow") and (),
        "'cow' is not one of",
    ),
    "no authority": (lambda given, _: (given / "ca.crt").unlink() or (), "ca.crt cannot be read"),
    "no file": (lambda given, _: (given / "federation.toml").unlink() or (), "no federation.toml"),
}


@pytest.mark.parametrize("case", JOINS)
def test_a_site_that_does_not_fit_gets_no_key(site, case):
    given, images = site
    change, message = JOINS[case]
    words = {"--name": "north", "--data": images}
    more = change(given, images)
    words |= dict(zip(more[::2], more[1::2], strict=True))
    code, _, err = call("join", given, *(word for pair in words.items() for word in pair))
    assert code == 2 and message in err
    assert not (given / "private").exists() and not list(given.glob("*.pub"))


# admit and expel


def public(tmp_path, name):
    keys.make_site_key(tmp_path / "private" / name, tmp_path / f"{name}.pub", name)
    return tmp_path / f"{name}.pub"


def test_sites_come_and_go(coordinator, tmp_path):
    where = ("--federation", coordinator)
    assert admitted(coordinator) == {}
    south, north = public(tmp_path, "south"), public(tmp_path, "north")
    for name, key in (("south", south), ("north", north)):
        code, out, err = call("admit", name, key, *where)
        assert (code, err) == (0, "") and f"{name} is admitted: SHA256:" in out
    found = admitted(coordinator)
    assert list(found) == ["north", "south"]
    assert found["south"].key == " ".join(south.read_text().split()[:2])
    assert found["south"].since.startswith("20") and found["south"].since.endswith("+00:00")
    before = (coordinator / "sites.toml").read_bytes()
    code, out, _ = call("admit", "north", north, *where)
    assert code == 0 and "already" in out and (coordinator / "sites.toml").read_bytes() == before
    code, out, _ = call("expel", "north", *where)
    assert code == 0 and "north is expelled" in out and list(admitted(coordinator)) == ["south"]
    code, _, err = call("admit", "north", north, *where)
    assert code == 2 and "this key was expelled on 20" in err and "fedhassle federation join" in err
    (tmp_path / "private" / "north").unlink()
    another = public(tmp_path, "north")
    assert call("admit", "north", another, "--federation", coordinator / "federation.toml")[0] == 0
    assert list(admitted(coordinator)) == ["north", "south"]


def test_the_number_of_a_sites_images_is_agreed_at_admission(coordinator, tmp_path):
    """It stays if the site is renamed, and changes if the site is admitted again with another."""
    where, north = ("--federation", coordinator), public(tmp_path, "north")
    code, out, _ = call("admit", "north", north, *where, "--images", 1200)
    assert code == 0 and "north may count 1,200 images, labelled or not" in out
    assert call("admit", "north", north, *where)[0] == 0
    assert [site.images for site in admitted(coordinator).values()] == [1200]
    assert admit_site(coordinator, "nroth", keys.read_public_key(north)) == "north"
    assert [(name, site.images) for name, site in admitted(coordinator).items()] == [("nroth", 1200)]
    assert call("admit", "north", north, *where, "--images", 1500)[0] == 0
    assert [(name, site.images) for name, site in admitted(coordinator).items()] == [("north", 1500)]
    for wrong in (0, 10**12 + 1):
        assert call("admit", "north", north, *where, "--images", wrong)[0] == 2
    (coordinator / "sites.toml").write_text(
        (coordinator / "sites.toml").read_text().replace("1500", "'many'")
    )
    with pytest.raises(UserError, match=r"sites\.north\.images"):
        admitted(coordinator)


def test_names_and_keys_occur_once(coordinator, tmp_path):
    where = ("--federation", coordinator)
    call("admit", "north", public(tmp_path, "north"), *where)
    (tmp_path / "private" / "north").unlink()
    code, _, err = call("admit", "north", public(tmp_path, "north"), *where)
    assert code == 2 and "another key (SHA256:" in err and "fedhassle federation expel north" in err
    code, _, err = call("expel", "nroth", *where)
    assert code == 2 and "did you mean 'north'?" in err
    assert list(admitted(coordinator)) == ["north"]


def test_a_site_is_admitted_by_the_name_that_its_key_has(coordinator, tmp_path):
    where, north = ("--federation", coordinator), public(tmp_path, "north")
    code, _, err = call("admit", "nroth", north, *where)
    assert code == 2 and "not nroth: run fedhassle federation admit north" in err
    assert admitted(coordinator) == {}
    key = keys.read_public_key(north)
    for said in ("", " somebody@somewhere", " two words"):  # nobody's name
        north.write_text(f"{key}{said}\n")
        assert call("admit", f"north{len(said)}", north, *where)[0] == 0


def test_a_site_that_was_admitted_by_another_name_keeps_its_key(coordinator, tmp_path):
    where, north = ("--federation", coordinator), public(tmp_path, "north")
    admit_site(coordinator, "nroth", keys.read_public_key(north))
    before = admitted(coordinator)["nroth"]
    code, out, err = call("admit", "north", north, *where)
    assert (code, err) == (0, "") and "nroth is now named north: SHA256:" in out
    assert admitted(coordinator) == {"north": before}
    admit_site(coordinator, "south", keys.read_public_key(public(tmp_path, "south")))
    with pytest.raises(UserError, match="south is already admitted"):
        admit_site(coordinator, "south", before.key)
    assert call("expel", "north", *where)[0] == 0 and call("admit", "north", north, *where)[0] == 2


def test_only_public_keys_are_admitted(coordinator, tmp_path):
    where = ("--federation", coordinator)
    public(tmp_path, "north")
    code, _, err = call("admit", "north", tmp_path / "private" / "north", *where)
    assert code == 2 and "private key" in err
    code, _, err = call("admit", "north", tmp_path / "none.pub", *where)
    assert code == 2 and "No such file" in err
    code, _, err = call("admit", "no/name", tmp_path / "north.pub", *where)
    assert code == 2 and "'no/name' cannot name a site" in err
    assert admitted(coordinator) == {}
    code, _, err = call("expel", "north", *where)
    assert code == 2 and "no site 'north' is admitted" in err
    code, _, err = call("admit", "north", tmp_path / "north.pub", "--federation", tmp_path)
    assert code == 2 and "no federation.toml" in err


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("x = = 1", ""),
        ("format = 1", "sites is missing"),
        ("format = 2\n[sites]", "format: .*got 2"),
        ("format = 1\nsites = 3", "sites must be a table"),
        ("format = 1\n[sites]\n[[expelled]]\nkey = 'x'", "expelled.0.since is missing"),
        ("format = 1\nexpelled = 3\n[sites]", "expelled: "),
        ("format = 1\n[sites.a]\nkey = 'x'", "sites.a.since is missing"),
        ("format = 1\n[sites.a]\nkey = 1\nsince = 'x'", "sites.a.key: .*string, got 1"),
        ("format = 1\n[sites.a]\nkey = 'x'\nsince = 'x'", "sites.a.key: .*OpenSSH"),
        ("format = 1\n[sites.'../a']\nkey = 'x'\nsince = 'x'", "cannot name a site"),
    ],
)
def test_a_damaged_record_is_a_user_error_and_is_kept(coordinator, tmp_path, text, key):
    (coordinator / "sites.toml").write_text(text)
    with pytest.raises(UserError, match=f"(?s)sites.toml.*{key}"):
        admitted(coordinator)
    with pytest.raises(UserError):
        admit_site(coordinator, "north", keys.read_public_key(public(tmp_path, "north")))
    with pytest.raises(UserError):
        expel_site(coordinator, "a")
    assert (coordinator / "sites.toml").read_text() == text


def test_a_record_is_checked_under_python_o_too(coordinator):
    """Python -O leaves out assertions."""
    (coordinator / "sites.toml").write_text("format = 2\n[sites]")
    code = "import sys, pathlib; from fedhassle.federation.setup.admission import admitted"
    code += "; print(admitted(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-O", "-c", code, str(coordinator)]
    done = subprocess.run(
        command, env=small.environment(), capture_output=True, text=True, timeout=small.LIMIT, check=False
    )
    assert done.returncode == 1 and "sites.toml: format: input should be 1, got 2" in done.stderr


def test_the_folder_is_found_by_its_file(created, tmp_path):
    assert federation_folder(created[0] / "federation.toml").path == federation_folder(created[0]).path
    with pytest.raises(UserError, match=r"no federation\.toml"):
        federation_folder(tmp_path)
