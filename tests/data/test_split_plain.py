"""One's own partition: splits from lists of rows, and from plain CSV, JSON and .npz files."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import call, summary_of

import fedhassle
from fedhassle.data.split.draw import split
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError

Y = np.array([0, 1, 0, 1, 0, 1, -1, -1])  # the last two images have no label
CSV = "row,client,labelled\n5,north,true\n2,north,False\n0,client 10,1\n7,client 2,0\n"
ENTRIES = [(5, "north", True), (2, "north", False), (0, "client 10", True), (7, "client 2", False)]


def written(folder, name, content):
    path = folder / name
    path.write_text(content, "utf-8")
    return path


def holdings(made):
    """The rows of each client, by name."""
    parts = zip(made.names, made.labelled, made.unlabelled, strict=True)
    return {name: (a.tolist(), b.tolist()) for name, a, b in parts}


EXPECTED = {"client 2": ([], [7]), "client 10": ([0], []), "north": ([5], [2])}


# From lists of rows


def test_lists_of_rows_make_a_split():
    made = Split.of([[4, 0], [2]], [(3,), np.array([5, 1], np.uint8)], ["north", "south"])
    assert holdings(made) == {"north": ([0, 4], [3]), "south": ([2], [1, 5])}
    assert all(part.dtype == np.int64 for part in made.labelled + made.unlabelled)
    assert fedhassle.Split is Split


def test_clients_with_names_are_sorted_by_them():
    made = Split.of([[0], [1], [2]], None, ["site 10", "site 9", "centre"])
    assert holdings(made) == {"centre": ([2], []), "site 9": ([1], []), "site 10": ([0], [])}
    assert made.names == ("centre", "site 9", "site 10")


def test_without_names_clients_are_numbered_and_the_hash_is_of_the_rows_alone():
    made = Split.of([[0], [2]], [[1], []])
    assert made.names == ("client 1", "client 2")
    raw = Split((np.array([0]), np.array([2])), (np.array([1]), np.array([], int)))
    assert made.hash == raw.hash == Split.of([[0], [2]], [[1], []], ["client 1", "client 2"]).hash
    assert made.hash != Split.of([[0], [2]], [[1], []], ["north", "south"]).hash
    assert Split.of([[0], [2]]).unlabelled[0].size == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0], [1]], [[2]]), "2, rows without labels of 1 .* one entry for each client"),
        (([[0], [1]], None, ["a"]), "names of 1 clients"),
        (([[0], [1]], None, ["a", "a"]), "two clients have the name 'a'"),
        (([[0], [1]], None, ["a", " "]), "no client is named"),
        (([[0], [1]], None, ["a", "b\n"]), None),  # spaces around a name do not count
        (([[0], [1]], None, ["a", "b\0"]), "printable"),
        (([[0.5]],), "whole numbers"),
        (([["a"]],), "whole numbers"),
        (([[True]],), "whole numbers"),
        (([[[0], [1, 2]]],), "whole numbers"),
        (([3],), "whole numbers"),
        (([[10**30]],), "whole numbers"),
        (([[-1]],), "uses row -1, but rows count from 0"),
        (([[0, 1], [1]],), "uses row 1 2 times"),
        (([[0]], [[0]]), "uses row 0 2 times"),
        (([[0], []], [[1], []]), "gives client 2 no rows"),
    ],
)
def test_mistakes_in_lists_are_explained(arguments, message):
    if message is None:
        assert Split.of(*arguments).names == ("a", "b")
        return
    with pytest.raises(UserError, match=message):
        Split.of(*arguments)


def test_a_split_is_checked_against_labels():
    made = Split.of([[0, 6]], [[7]])
    with pytest.raises(UserError, match=r"row 6 as labelled, but its image has no label \(−1\)"):
        made.check(Y)
    Split.of([[0]], [[6, 7]]).check(Y)
    with pytest.raises(UserError, match="uses row 7, but the data set has 7 rows"):
        made.check(Y[:7])


# Files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("a.CSV", "﻿" + CSV.replace("\n", "\r\n")),
        ("a.tsv", CSV.replace(",", "\t")),
        ("a.csv", "sep=;\n" + CSV.replace(",", ";")),
        (
            "a.csv",
            "labelled,note,client,row\nTRUE,x,north,5.0\n0,,north,2\n\n1,,client 10,0\n0,,client 2,7\n",
        ),
        (
            "a.json",
            json.dumps([dict(zip(("row", "client", "labelled"), one, strict=True)) for one in ENTRIES]),
        ),
        (
            "a.json",
            '{"north": {"labelled": [5], "unlabelled": [2]}, "client 10": [0], '
            '"client 2": {"unlabelled": [7]}}',
        ),
    ],
)
def test_text_files_of_one_partition_give_one_split(name, content, tmp_path):
    """In any order of lines: rows are sorted, and clients by name, client 2 before client 10."""
    made = Split.load(written(tmp_path, name, content), Y)
    assert list(holdings(made).items()) == list(EXPECTED.items())
    assert made.hash == Split.of(made.labelled, made.unlabelled, made.names).hash


@pytest.mark.parametrize("kind", [bool, int, np.uint8])
def test_arrays_of_the_same_partition_give_the_same_split(kind, tmp_path):
    row, client, labelled = (np.array(column) for column in zip(*ENTRIES, strict=True))
    np.savez(tmp_path / "a.npz", row=row.astype(np.uint16), client=client, labelled=labelled.astype(kind))
    assert holdings(Split.load(tmp_path / "a.npz", Y)) == EXPECTED


def test_numbers_are_names_and_rows_are_labelled_by_default(tmp_path):
    np.savez(tmp_path / "a.npz", row=np.arange(4), client=np.array([10, 2, 10, 3]))
    files = [
        tmp_path / "a.npz",
        written(tmp_path, "b.csv", "row,client\n0,10\n1,2\n2,10\n3,3\n"),
        written(tmp_path, "c.json", '{"2": [1], "3": [3], "10": [0, 2]}'),
        written(tmp_path, "d.json", '[{"row":0,"client":10},{"row":1,"client":2},{"row":2.0,"client":"10"},'
                '{"row":3,"client":3}]'),
    ]  # fmt: skip
    for file in files:
        assert holdings(Split.load(file)) == {"2": ([1], []), "3": ([3], []), "10": ([0, 2], [])}
    assert len({Split.load(file).hash for file in files}) == 1


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".json", ".JSON"])
def test_every_format_keeps_the_split(suffix, tmp_path):
    drawn = split(np.repeat(np.arange(4), 60), clients=12, labels={"full": 1, "partial": 11, "share": 0.2})
    named = Split.of([[3], [0, 8]], [[], [5]], ["Süd, Haus 2", '"q"'])
    for made in (drawn, named):
        path = tmp_path / f"split{suffix}"
        made.save(path)
        loaded = Split.load(path, np.zeros(240, int))
        assert loaded.hash == made.hash
        assert list(holdings(loaded).items()) == list(holdings(made).items())


BAD_CSV = {
    "row,client\n": "no client holds a row",
    "": "is empty",
    "row,owner\n1,a\n": "one column 'client'",
    "row,client,row\n1,a,2\n": "one column 'row'",
    "row,client\n1,a\n-1,a\n": "line 3: the row is '-1'",
    "row,client\n1,a\n1.5,a\n": "line 3: the row is '1.5'",
    "row,client\n1,a\n,a\n": "line 3: the row is ''",
    "row,client\n1e3,a\n": "line 2: the row is '1e3'",
    "row,client\n٣,a\n": "line 2: the row is",
    f"row,client\n{'9' * 6000},a\n": "line 2: the row is '9",
    "row,client\n1,a\n\n8,a\n": "line 4: there is no row 8: the data set has rows 0 to 7",
    "row,client\n1,a\n2,b\n0,c\n2,a\n1,d\n": "line 5: row 2 is taken already, in line 3",
    "row,client\n1,\n": "line 2: no client is named",
    "row,client\n1,a\x07\n": "line 2: the client is .*printable",
    f"row,client\n1,{'a' * 101}\n": "line 2: the client is",
    "row,client,labelled\n1,a,yes\n": "line 2: labelled is 'yes'; expected true or false",
    "row,client,labelled\n1,a,1\n2,a,\n": "line 3: labelled is ''",
    "row,client,labelled\n1,a,2\n": "line 2: labelled is '2'",
    "row,client,labeled\n1,a,0\n": "'labeled' is not read: call it labelled",
    "row,client,Unlabelled\n1,a,0\n": "'unlabelled' is not read",
    "row,client\n1,a\n6,a\n": r"line 3: row 6 is labelled, but its image has no label \(−1\)",
    "row,client\n1,a,b\n": "row 2 has 3 cells",
    'row,client\n1,"a\n2,b\n': "not valid CSV",
}


@pytest.mark.parametrize("content", BAD_CSV, ids=BAD_CSV.values())
def test_a_mistake_in_a_csv_file_names_its_line(content, tmp_path):
    with pytest.raises(UserError, match=rf"own\.csv.*{BAD_CSV[content]}"):
        Split.load(written(tmp_path, "own.csv", content), Y)


BAD_JSON = {
    "": "not valid JSON",
    "[" * 100_000: "not valid JSON",
    "3": "holds 3; expected a list of entries",
    "[]": "no client holds a row",
    "{}": "no client holds a row",
    "[3]": "entry 0 is 3; expected an object",
    '[{"row": 1}]': "entry 0 is",
    '[{"row": 1, "client": "a", "labeled": true}]': "entry 0 is",
    '[{"row": 1, "client": "a"}, {"row": true, "client": "a"}]': "entry 1: the row is True",
    '[{"row": NaN, "client": "a"}]': "entry 0: the row is nan",
    '[{"row": 1, "client": null}]': "entry 0: the client is None",
    '[{"row": 1, "client": "a", "labelled": null}]': "entry 0: labelled is None",
    '[{"row": 1, "client": "a", "labelled": 0.5}]': "entry 0: labelled is 0.5",
    '[{"row": 1, "client": "a"}, {"row": 1, "client": "b"}]': "entry 1: row 1 is taken already, in entry 0",
    '{"a": []}': "client 'a' holds no rows",
    '{"a": {}}': "client 'a' holds no rows",
    '{"a": 3}': "client 'a' holds 3; expected a list of rows",
    '{"a": {"labelled": [1], "rest": [2]}}': "client 'a' holds",
    '{"a": {"labelled": {"0": 1}}}': "client 'a' holds",
    '{"a": [1], "b": [2, 99]}': "client 'b': there is no row 99",
    '{"a": [1], "b": [[2]]}': r"client 'b': the row is \[2\]",
    '{"a": [1], "a": [2]}': "the key 'a' stands twice",
    '{"a": [1], "b": [1]}': "client 'b': row 1 is taken already, in client 'a'",
    '{"a": [7]}': "client 'a': row 7 is labelled, but",
}


@pytest.mark.parametrize("content", BAD_JSON, ids=BAD_JSON.values())
def test_a_mistake_in_a_json_file_names_its_place(content, tmp_path):
    with pytest.raises(UserError, match=rf"own\.json.*{BAD_JSON[content]}"):
        Split.load(written(tmp_path, "own.json", content), Y)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"row": [1, 2]}, "lacks the array client"),
        ({"client": [1, 2]}, "lacks the array row"),
        ({"row": [1, 2], "client": [1]}, r"client is int64 of shape \(1,\); expected as many"),
        ({"row": [[1], [2]], "client": [1, 2]}, r"row is int64 of shape \(2, 1\)"),
        ({"row": [1, 2], "client": [b"a", b"b"]}, "client is .S1"),
        ({"row": [1, 2.5], "client": ["a", "b"]}, "entry 1: the row is 2.5"),
        ({"row": [1, -2], "client": ["a", "b"]}, "entry 1: the row is -2"),
        ({"row": [1, 2], "client": [0.5, 1]}, "entry 0: the client is 0.5"),
        ({"row": [1, 2], "client": ["a", "b"], "labelled": [1, 7]}, "entry 1: labelled is 7"),
        ({"row": [1, 9], "client": ["a", "b"]}, "entry 1: there is no row 9"),
        ({"row": [1], "client": [1], "is_labeled": [0]}, "'is_labeled' is not read: call it labelled"),
        ({"row": [], "client": []}, "no client holds a row"),
        ({"row": np.array([None]), "client": [1]}, "Python objects"),
    ],
)
def test_a_mistake_in_arrays_names_its_entry(arrays, message, tmp_path):
    np.savez(tmp_path / "own.npz", **{name: np.array(array) for name, array in arrays.items()})
    with pytest.raises(UserError, match=rf"own\.npz.*{message}"):
        Split.load(tmp_path / "own.npz", Y)


CELL = st.one_of(
    st.integers(-2, 9), st.sampled_from(["a", "true", "", '"', "1.0", "\0", "ü"]), st.text(max_size=3)
)


@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(st.tuples(CELL, CELL, CELL)).map(
            lambda lines: ("row,client,labelled\n" + "\n".join(",".join(map(str, x)) for x in lines)).encode(
                "utf-8", "replace"
            )
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=2),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["row", "client", "labelled", "a"]), inner, max_size=3)
            ),
        ).map(lambda value: json.dumps(value).encode()),
    ),
    st.sampled_from(["own.csv", "own.json", "own.npz", "own"]),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_file_is_a_split_or_a_user_error(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    try:
        made = Split.load(tmp_path / name, Y)
    except UserError as error:
        assert "own" in str(error)
    else:
        made.check(Y)


# Runs


def test_a_run_takes_a_csv_file_and_keeps_the_names(words, images, tmp_path):
    """The clients' names are in the run's own split, and in the table of `fedhassle split`."""
    lines = [f"{row},{'écho' if row % 3 else 'a/b'},{str(row % 4 == 0).lower()}" for row in range(60)]
    own = written(tmp_path, "own.csv", "row,client,labelled\n" + "\n".join(lines))
    chosen = [word for word in words if not word.startswith(("split.", "method."))]
    chosen += [f"split.file={own}", "clients_per_round=2", "rounds=1", "method=fedmatch", "method.epochs=1"]
    assert call("run", *chosen, "--out", tmp_path / "run")[0] == 0
    made = Split.load(tmp_path / "run" / "split.npz")
    assert made.names == ("a/b", "écho") and made.hash == Split.load(own).hash
    assert summary_of(tmp_path / "run")["split_hash"] == made.hash
    code, out, _ = call("split", *chosen, "--picture", tmp_path / "x.png")
    assert code == 0 and "a/b" in out and "écho" in out
    own.write_text(own.read_text("utf-8") + "\n240,a/b,true\n", "utf-8")
    code, _, err = call("run", *chosen, "--out", tmp_path / "other")
    assert code == 2 and "own.csv: line 62: there is no row 240" in err and not (tmp_path / "other").exists()


def test_split_saves_a_csv_file_that_a_run_takes(words, finished, tmp_path):
    """As a spreadsheet shows it; the run is the same as with the drawn split."""
    save = tmp_path / "split.csv"
    assert call("split", *words, "--save", save, "--picture", tmp_path / "x.png")[0] == 0
    assert save.read_text("utf-8").startswith("row,client,labelled\n")
    assert Split.load(save).hash == summary_of(finished[0])["split_hash"]
