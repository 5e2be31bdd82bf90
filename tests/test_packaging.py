"""What `pip install hetpeer` brings: everything that the checkout has."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


def test_the_wheel_has_every_file_of_every_package(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in BESIDE:
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "hetpeer", tree / "hetpeer", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hetpeer-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hetpeer/")}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "hetpeer").rglob("*") if path.is_file()}
    assert packed == {name for name in ours if "__pycache__" not in name}
