"""The federation's file: its content, its errors, and the parts that its hash covers."""

import hashlib
import re
from dataclasses import replace

import pytest

from fedhassle.data.site.folder import ImageForm
from fedhassle.errors import UserError
from fedhassle.federation.agreement import (
    Agreement,
    DataTerms,
    Rules,
    agreement_hash,
    parsed_address,
    read_agreement,
    run_request,
    write_agreement,
)
from fedhassle.settings.schema import resolve

FILE = """
format = 1
name = "Three hospitals"
address = "fl.example.org:8443"

[data]
class_names = ["benign", "malignant"]
height = 32
width = 48
channels = 3
mean = [0.5, 0.5, 0]
std = [0.2, 0.2, 1]
flip = true
crop = 4

[run]
method = "fedavg"
rounds = 5
"""

TERMS = DataTerms(("benign", "malignant"), 32, 48, 3, (0.5, 0.5, 0.0), (0.2, 0.2, 1.0), flip=True, crop=4)
AGREEMENT = Agreement(
    "Three hospitals", "fl.example.org:8443", TERMS, {"method": "fedavg", "rounds": 5}, Rules()
)


def read(tmp_path, text):
    (tmp_path / "federation.toml").write_text(text, "utf-8")
    return read_agreement(tmp_path / "federation.toml")


def test_the_file_is_read_with_its_defaults(tmp_path):
    found = read(tmp_path, FILE)
    assert found == AGREEMENT == read_agreement(tmp_path)  # by its folder too
    assert (found.data.validation, found.data.coarse_counts) == (0.1, False)
    assert found.rules == Rules(minimum_sites=2, timeout=3600, wait=600)
    assert found.data.form == ImageForm(("benign", "malignant"), 32, 48, 3)
    assert all(type(value) is float for value in (*found.data.mean, *found.data.std))


def test_a_file_that_a_windows_editor_has_saved_is_read(tmp_path):
    """With a byte order mark, and with carriage returns."""
    (tmp_path / "federation.toml").write_bytes(b"\xef\xbb\xbf" + FILE.replace("\n", "\r\n").encode())
    assert read_agreement(tmp_path) == AGREEMENT


def test_a_written_file_is_read_again(tmp_path):
    terms = replace(TERMS, class_names=("größe", 'a"b\\', "[x]"), validation=0.25, coarse_counts=True)
    run = {"method": {"name": "hassle", "epochs": 2, "lr": 0.1}, "seed": 3}
    wanted = Agreement("Zürich & Co", "[::1]:8443", terms, run, Rules(3, 60.5, 7.0))
    write_agreement(wanted, tmp_path / "deep" / "federation.toml")
    assert read_agreement(tmp_path / "deep") == wanted


def test_a_wrong_agreement_is_not_written(tmp_path):
    with pytest.raises(UserError, match="channels"):
        write_agreement(replace(AGREEMENT, data=replace(TERMS, channels=2)), tmp_path / "federation.toml")
    assert list(tmp_path.iterdir()) == []


BAD = {
    "not TOML": ("format = = 1", "not valid TOML"),
    "no format": (FILE.replace("format = 1", ""), "expected format = 1"),
    "another format": (FILE.replace("format = 1", "format = 0"), "expected format = 1"),
    "a newer format": (FILE.replace("format = 1", "format = 2"), "newer fedhassle"),
    "unknown key": (FILE.replace("address", "adress"), "unknown key 'adress', did you mean 'address'"),
    "unknown key of a table": (FILE + "[rules]\nminimum_site = 1", "'rules.minimum_site', did you mean"),
    "unlike any": (
        FILE + "[rules]\nq = 1",
        r"'rules.q' \(known are minimum_sites, timeout, wait, ",
    ),
    "missing": (
        FILE.replace("height = 32", "").replace("crop = 4", ""),
        r"data\.height is missing\n.*data\.crop is missing",
    ),
    "not a table": (FILE.replace("[run]", "[[run]]"), "run must be a table"),
    "no data": ('format = 1\nname = "x"\naddress = "a:1"\n', "data is missing"),
    "a number for a name": (FILE.replace('"Three hospitals"', "3"), "name: .*string, got 3"),
    "text for a number": (FILE.replace("32", '"32"'), "data.height: .*integer, got '32'"),
    "truth for a number": (FILE.replace("32", "true"), "data.height: .*integer, got True"),
    "a number for truth": (FILE.replace("flip = true", "flip = 1"), "data.flip: .*boolean, got 1"),
    "a fraction of a pixel": (FILE.replace("32", "32.0"), "data.height: .*integer, got 32.0"),
    "not a list": (FILE.replace("[0.5, 0.5, 0]", "0.5"), "data.mean: .*list, got 0.5"),
    "infinite": (FILE.replace("[0.5, 0.5, 0]", "[inf, 0, 0]"), "data.mean.0: .*finite number, got inf"),
    "vast": (FILE.replace("[0.5, 0.5, 0]", f"[{'9' * 400}, 0, 0]"), "data.mean.0: .*number, got 999"),
    "too few means": (FILE.replace("[0.5, 0.5, 0]", "[0.5]"), r"data.mean needs .*\(3\)"),
    "no spread": (FILE.replace("[0.2, 0.2, 1]", "[0.2, 0.2, 0]"), "data.std must be positive"),
    "two channels": (FILE.replace("channels = 3", "channels = 2"), "data.channels: .*1 .*or 3 .*got 2"),
    "no size": (FILE.replace("32", "0"), "data.height: .*1, got 0"),
    "a vast size": (FILE.replace("48", "100000"), "data.width: .*4096, got 100000"),
    "all is cropped": (FILE.replace("crop = 4", "crop = 32"), r"data.crop .*\(32\), got 32"),
    "all for validation": (
        FILE.replace("crop = 4", "crop = 4\nvalidation = 1"),
        "data.validation: .*less than 1",
    ),
    "one class": (FILE.replace(', "malignant"', ""), "data.class_names: .*two classes"),
    "a class twice": (FILE.replace("malignant", "benign"), "data.class_names: 'benign' .*twice"),
    "a class without a name": (FILE.replace("malignant", ""), "data.class_names: ''"),
    "a class with spaces around": (FILE.replace("malignant", "malignant "), "data.class_names: 'malignant '"),
    "a class that writes": (
        FILE.replace("malignant", r"\u001b[2J"),
        r"data.class_names: '\\x1b\[2J' cannot name",
    ),
    "a class called unlabelled": (FILE.replace("malignant", "Unlabelled"), "data.class_names: 'Unlabelled'"),
    "no sites": (FILE + "[rules]\nminimum_sites = 0", "rules.minimum_sites: .*1, got 0"),
    "no time": (FILE + "[rules]\ntimeout = 0", "rules.timeout: .*0, got 0"),
    "data in the run": (FILE + "data = 'cifar10'", "run.data .*remove it"),
    "split in the run": (FILE + "split.clients = 3", "run.split .*remove it"),
    "a machine's device": (
        FILE + "device = 'cuda'",
        "run.device .*remove it: see fedhassle federation node --help",
    ),
    "a machine's threads": (FILE + "threads = 4", "run.threads "),
    "a machine's lanes": (FILE + "lanes = 2", "run.lanes "),
    "a machine's precision": (FILE + "precision = 'fp32'", "run.precision "),
    "a machine's kernels": (FILE + "compile = false", "run.compile "),
    "a machine's bits": (FILE + "deterministic = true", "run.deterministic "),
    "no address": (FILE.replace("fl.example.org:8443", "fl.example.org"), "address: .*expected host:port"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_is_a_user_error_that_names_the_key(tmp_path, case):
    text, message = BAD[case]
    with pytest.raises(UserError, match=rf"federation\.toml.*{message}"):
        read(tmp_path, text)


def test_an_error_is_a_line_with_the_file_and_the_key(tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path, FILE.replace("32", '"32"') + "[rules]\nwaiting = 1")
    path = tmp_path / "federation.toml"
    assert str(error.value).splitlines() == [
        f"{path}: data.height: input should be a valid integer, got '32'",
        f"{path}: unknown key 'rules.waiting', did you mean 'wait'?",
    ]


def test_a_file_that_cannot_be_read_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"federation\.toml cannot be read: No such file"):
        read_agreement(tmp_path)
    (tmp_path / "federation.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match="cannot be read"):
        read_agreement(tmp_path)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("fl.example.org:8443", ("fl.example.org", 8443)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
        ("localhost:9092", ("localhost", 9092)),
    ],
)
def test_addresses(address, expected):
    assert parsed_address(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":8443", "host:0", "host:65536", "host:x", "::1:8443", "[host]:8443"),
        *("https://host:8443", "host:8443/", "a b:8443", "0.0.0.0:8443", "[::]:8443"),
    ],
)
def test_a_wrong_address_is_a_user_error(address):
    with pytest.raises(UserError, match=re.escape(repr(address))):
        parsed_address(address)


def test_the_hash_covers_what_sites_must_share():
    known = agreement_hash(AGREEMENT)
    assert len(known) == 16 and agreement_hash(replace(AGREEMENT)) == known
    alike = [
        replace(AGREEMENT, address="other:1"),
        replace(AGREEMENT, rules=Rules(7)),
        replace(AGREEMENT, run={"rounds": 9, "method": {"name": "fedavg"}}),  # spelled out
        replace(AGREEMENT, run={"method": "fedavg", "seed": 4, "track": "mlflow", "clients_per_round": 2}),
    ]
    assert [agreement_hash(other) for other in alike] == [known] * len(alike)
    terms = [
        {"class_names": ("malignant", "benign")},
        {"height": 33},
        {"width": 49},
        {"mean": (0.5, 0.5, 0.1)},
        {"std": (0.2, 0.2, 1.1)},
        {"flip": False},
        {"crop": 5},
        {"validation": 0.2},
        {"coarse_counts": True},
        {"patients": "column"},
        {"intensities": "12 bits"},
    ]
    others = [replace(AGREEMENT, data=replace(TERMS, **change)) for change in terms]
    others += [replace(AGREEMENT, name="other"), replace(AGREEMENT, run={"method": "hassle"})]
    others += [replace(AGREEMENT, run={"method": "fedavg", "net": "lenet"})]
    assert len({known, *(agreement_hash(other) for other in others)}) == len(others) + 1


def test_the_hash_does_not_change_from_one_version_to_the_next():
    """Members of a federation compare it: to change its definition is to change the format."""
    text = (
        '{"data": {"channels": 3, "class_names": ["benign", "malignant"], "coarse_counts": false, "crop": 4, '
        '"flip": true, "height": 32, "mean": [0.5, 0.5, 0.0], "std": [0.2, 0.2, 1.0], "validation": 0.1, '
        '"width": 48}, "format": 1, "name": "Three hospitals", "run": {"method": {"name": "fedavg"}}}'
    )
    assert agreement_hash(AGREEMENT) == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_run_holds_the_settings_of_a_run():
    settings = resolve(run_request(AGREEMENT))
    assert (settings.method.name, settings.rounds, settings.clients_per_round) == ("fedavg", 5, 8)
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        resolve(run_request(replace(AGREEMENT, run={"round": 5})))
