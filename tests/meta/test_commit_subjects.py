"""Subjects of commits are short enough for one line of a list. See CONTRIBUTING.md."""

from __future__ import annotations

import subprocess

import pytest
from source_files import ROOT

BASE = "74f9bc9f17f4407cc17311b32820349eda1f954d"  # older subjects stay as they are
MOST_CHARACTERS = 72


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)


def test_subjects_have_at_most_72_characters() -> None:
    if git("merge-base", "--is-ancestor", BASE, "HEAD").returncode:
        pytest.skip("the history is not here, or does not contain the base")
    subjects = git("log", "--no-merges", "--format=%s", f"{BASE}..HEAD").stdout.splitlines()
    assert [subject for subject in subjects if len(subject) > MOST_CHARACTERS] == []
