"""What `pip install` gets: all of the packages, with what they read besides Python."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "cachemap", "policies", "replicas", "loadgen")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import setuptools.build_meta as it; print(it.build_wheel('out'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return zipfile.ZipFile(next((tree / "out").glob("hitherto-*.whl")))


def test_every_file_of_the_packages_is_in_it(wheel):
    here = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path}
    assert here - set(wheel.namelist()) == set()


def test_it_says_what_it_is(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    text = wheel.read(name).decode()
    assert "\nRequires-Python: >=3.11\n" in text and "\nClassifier: Typing :: Typed\n" in text
    assert "torch" not in [
        line.split(":")[1].split()[0]
        for line in text.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
