"""What `pip install hetpeer` brings: everything that the checkout has."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("dht", "stages", "averaging", "bootstrap", "peer", "examples")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


def test_the_wheel_has_every_file_of_every_package(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in BESIDE:
        shutil.copy(ROOT / name, tree)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hetpeer-*.whl")
    packed = {
        name.removeprefix("hetpeer/")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("hetpeer/")
    }
    ours = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file()
    }
    assert packed == {name for name in ours if "__pycache__" not in name}
