"""What repo2docker makes of binder/: it writes the steps of the image without an engine that runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import REPOSITORY


@pytest.fixture(scope="module")
def image() -> str:
    words = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(REPOSITORY)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout + ended.stderr


def test_the_image_has_a_tested_python(image: str) -> None:
    named = (REPOSITORY / "binder/runtime.txt").read_text().strip().removeprefix("python-")
    assert f"python={named}" in image
    assert f"Programming Language :: Python :: {named}" in (REPOSITORY / "pyproject.toml").read_text()


def test_the_image_installs_and_then_runs_the_last_step(image: str) -> None:
    install, post_build = image.find('-r "binder/requirements.txt"'), image.find("RUN ./binder/postBuild")
    assert 0 < install < post_build
