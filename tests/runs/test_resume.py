"""A run that is cut after any round resumes there and ends in the same bits."""

import json
import shutil

import pytest
import small
from small import assert_same_result, but_seconds, call, cut, metrics_of, tensors_of

import fedhassle
from fedhassle.provenance import versions
from fedhassle.runs.folder import claim
from fedhassle.settings.request import request


@pytest.mark.parametrize("rounds", range(9))
def test_a_run_cut_after_any_round_ends_in_the_same_bits(rounds, eight_rounds, whole, tmp_path):
    cut(eight_rounds, tmp_path / "run", rounds)
    code, out, _ = call("resume", tmp_path / "run")
    assert code == 0
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("round ")]
    assert shown == [
        f"{t}/8" for t in (2, 4, 6, 8) if t > rounds // 2 * 2
    ]  # finished rounds are not repeated
    assert_same_result(tmp_path / "run", whole)


def test_a_run_cut_before_its_settings_were_resolved_resumes(eight_rounds, whole, tmp_path):
    folder = claim(request(None, eight_rounds), tmp_path / "run")
    assert [path.name for path in folder.path.iterdir()] == ["request.json"]
    assert call("resume", folder.path)[0] == 0
    assert_same_result(folder.path, whole)


def test_python_resumes_a_run_by_its_folder(eight_rounds, whole, tmp_path):
    cut(eight_rounds, tmp_path / "run", 3)
    result = fedhassle.run(out=tmp_path / "run", quiet=True)
    assert result.folder == tmp_path / "run"
    assert_same_result(tmp_path / "run", whole)


def test_python_resumes_a_run_that_was_cut_before_its_settings_were_resolved(eight_rounds, whole, tmp_path):
    folder = claim(request(None, eight_rounds), tmp_path / "run").path
    fedhassle.run(out=folder, quiet=True)
    assert_same_result(folder, whole)


@pytest.mark.parametrize(
    "resolved",
    [True, False],
    ids=["resolved", "as asked"],
)
def test_a_run_resumes_from_another_working_folder(
    resolved, eight_rounds, whole, images, tmp_path, monkeypatch
):
    """The path of its images was relative to the first one."""
    folder, relative = tmp_path / "run", [f"data={images.name}", *eight_rounds[1:]]
    monkeypatch.chdir(images.parent)
    if resolved:
        cut(relative, folder, 3)
    else:
        claim(request(None, relative), folder)
    monkeypatch.chdir(tmp_path)
    code, _, err = call("resume", folder)
    assert code == 0, err
    assert_same_result(folder, whole)


def test_a_run_keeps_its_split_when_the_split_file_is_removed(eight_rounds, tmp_path):
    save, folder = tmp_path / "given.npz", tmp_path / "run"
    call("split", *eight_rounds, "--save", save, "--picture", tmp_path / "x.png")
    given = [word for word in eight_rounds if not word.startswith("split.")]
    cut([*given, f"split.file={save}"], folder, 3)
    save.unlink()
    assert call("resume", folder)[0] == 0


def files_in(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }


def test_a_finished_run_says_so_and_changes_nothing(whole):
    before = files_in(whole)
    code, out, _ = call("resume", whole)
    assert code == 0 and "is finished" in out and "EM  mean of SM and UM" in out
    assert files_in(whole) == before


def test_the_lock_file_of_a_process_that_was_killed_at_the_end_is_removed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for again in (lambda: call("resume", tmp_path / "run"), lambda: fedhassle.run(out=tmp_path / "run")):
        (tmp_path / "run" / ".lock").touch()
        again()
        assert_same_result(tmp_path / "run", whole)


def test_python_returns_the_result_of_a_finished_run_and_changes_nothing(whole):
    before = files_in(whole)
    result = fedhassle.run(out=whole, quiet=True)
    assert result.summary == json.loads((whole / "summary.json").read_text())
    score = result.accuracy["EM"]["mean_of_last"]
    assert repr(result) == f"Result('{whole}', hassle, EM {100 * score:.2f}%)"
    assert files_in(whole) == before


def test_a_run_cut_between_its_last_round_and_its_summary_is_finished(eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in ("summary.json", "model.safetensors", "curves.png"):
        (folder / name).unlink()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)
    tensors = [tensors_of(f / "checkpoints" / "round-000008.safetensors") for f in (folder, whole)]
    assert small.same(*tensors)


def test_a_run_whose_own_code_has_changed_is_not_resumed(without_residuals, module, tmp_path):
    """Its rounds would mix two methods; removing own_code.txt overrides this."""
    name, folder = module("own_changed", small.KEEPS.replace("NAME", "kept")), tmp_path / "run"
    mine = [*without_residuals, f"method={name}:Keeps"]
    cut(mine, folder, 3)
    module(name, small.KEEPS.replace("NAME", "kept") + "# another method\n")
    code, _, err = call("resume", folder)
    assert code == 2 and "own_changed has changed since" in err
    with pytest.raises(fedhassle.UserError, match=r"remove .*own_code\.txt"):
        fedhassle.run(out=folder, quiet=True)
    module(name, small.KEEPS.replace("NAME", "kept"))
    assert call("resume", folder)[0] == 0
    noted = small.summary_of(folder)["versions"]["own_changed:Keeps"]
    assert (folder / "own_code.txt").read_text() == f"own_changed:Keeps {noted}\n" and noted
    cut(mine, tmp_path / "second", 3)
    module(name, small.KEEPS.replace("NAME", "kept") + "# another method\n")
    (tmp_path / "second" / "own_code.txt").unlink()
    assert call("resume", tmp_path / "second")[0] == 0


def test_a_run_of_a_built_in_method_has_no_own_code(whole):
    assert not (whole / "own_code.txt").exists()
    assert small.summary_of(whole)["versions"].keys() == versions().keys()


# Clients with state of their own


@pytest.mark.parametrize("name", ["kept", "kept/model"])
def test_the_state_of_clients_survives_a_cut(name, without_residuals, module, tmp_path):
    own = module("own_" + name.replace("/", "_"), small.KEEPS.replace("NAME", name))
    mine = [*without_residuals, "rounds=8", f"method={own}:Keeps"]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert call("run", *mine, "--out", whole)[0] == 0
    assert call("run", *mine, "method=fedavg", "--out", tmp_path / "other")[0] == 0
    with_memory, without = (but_seconds(metrics_of(f)) for f in (whole, tmp_path / "other"))
    assert with_memory != without  # the state matters
    cut(mine, folder, 5)
    kept = small.kept_by(folder)
    assert {client for client, _ in kept} <= {"client 1", "client 2", "client 3"} and len(kept) > 1
    assert all(set(arrays) == {name} for arrays in kept.values())
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)
