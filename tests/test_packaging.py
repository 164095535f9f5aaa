"""What a release consists of: the source archive, the version in every place, the pages for contributors."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NOT_RELEASED = {".ci", ".gitignore"}
ALWAYS = {"pyproject.toml"}  # the build puts it in by itself


def text_of(name):
    return (ROOT / name).read_text("utf-8")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_the_source_archive_has_all_that_make_needs():
    """Everything that is tracked, so that `make run` and `make test` work in it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {path.split("/")[0] for path in listed.stdout.splitlines()}
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert set(included) == {f"/{name}" for name in tracked - NOT_RELEASED - ALWAYS}


def test_every_place_has_the_same_version():
    version = PROJECT["project"]["version"]
    assert re.search(r"^version: (.*)$", text_of("CITATION.cff"), re.MULTILINE)[1] == version
    assert re.search(r"^## (\S+?),? ", text_of("CHANGELOG.md"), re.MULTILINE)[1] == version


def test_every_typer_that_pip_may_choose_uses_click_itself():
    """From 0.26 on typer has a copy of click: its help differs, and it does not know errors of click."""
    needed = {one.name: one.specifier for one in map(Requirement, PROJECT["project"]["dependencies"])}
    assert needed["typer"].contains("0.20.0") and needed["typer"].contains("0.25.1")
    assert not needed["typer"].contains("0.26.0") and not needed["typer"].contains("0.19.2")


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_pages_at_the_top_lead_to_files(page):
    targets = [one for one in re.findall(r"\]\(([^)#]+)", text_of(page)) if "://" not in one]
    assert all((ROOT / target).exists() for target in targets)


def test_the_targets_of_make_in_the_guide_exist():
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", text_of("CONTRIBUTING.md")))
    assert {"test", "install", "lint", "test-faults"} <= named <= targets
