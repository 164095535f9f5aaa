"""Versions and hardware that a result depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedhassle.provenance import own_code


def test_own_code_is_the_hash_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"class Mine:\n    pass\n"
    (tmp_path / "code_of_mine.py").write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert own_code("code_of_mine:Mine") == hashlib.sha256(text).hexdigest()[:12]
    assert own_code(f"{tmp_path}/code_of_mine.py:Mine") == own_code("code_of_mine:Mine")
    assert own_code("sys:path") is None  # built in: it has no source
    assert own_code("hassle") is None
