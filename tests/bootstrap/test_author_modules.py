"""The author's file imports what it could import when Python runs it, whenever it does so."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpeer.bootstrap.authoring.user_code import author_samples
from hetpeer.dht.base.errors import LocalError


@pytest.fixture(autouse=True)
def _own_imports() -> Iterator[None]:
    """Nothing that a test imports is there for the next one."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def written(folder: Path, **files: str) -> None:
    """Write modules, `a__b` as a/b.py."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def package(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()


def samples(path: Path) -> list[object]:
    return list(author_samples(f"{path}:data"))


VALUE = "VALUE = 7\n"
LATE = "def data():\n    from {0} import VALUE\n    yield VALUE\n"
EARLY = "from {0} import VALUE\ndef data():\n    yield VALUE\n"


@pytest.mark.parametrize("text", [EARLY, LATE])
@pytest.mark.parametrize(
    "neighbour", ["beside", ".beside", "ours.beside", "ours.deep.within", ".deep.within"]
)
def test_imports_of_a_file_in_a_package(tmp_path: Path, text: str, neighbour: str) -> None:
    for folder in ("ours", "ours/deep"):
        package(tmp_path / folder)
    written(tmp_path, ours__beside=VALUE, ours__deep__within=VALUE, ours__mine=text.format(neighbour))
    assert samples(tmp_path / "ours" / "mine.py") == [7]


@pytest.mark.parametrize("text", [EARLY, LATE])
def test_a_source_folder_is_where_absolute_names_begin(tmp_path: Path, text: str) -> None:
    """Without any `__init__.py`, as in a package of namespaces."""
    written(tmp_path / "src", kit__parts__piece=VALUE, kit__train__mine=text.format("kit.parts.piece"))
    assert samples(tmp_path / "src" / "kit" / "train" / "mine.py") == [7]


def test_what_the_package_has_imported_itself_is_not_imported_twice(tmp_path: Path) -> None:
    package(tmp_path / "twofold")
    (tmp_path / "twofold" / "__init__.py").write_text("from . import mine\n")
    text = "import builtins\nbuiltins.imported = getattr(builtins, 'imported', 0) + 1\n"
    written(tmp_path, twofold__mine=text + "def data():\n    yield imported\n")
    assert samples(tmp_path / "twofold" / "mine.py") == [1]


def test_a_neighbour_does_not_stand_in_for_a_library_afterwards(tmp_path: Path) -> None:
    written(tmp_path, wave=VALUE, mine=EARLY.format("wave"))
    assert samples(tmp_path / "mine.py") == [7]
    del sys.modules["wave"]
    import wave

    assert hasattr(wave, "Wave_read")


def test_a_function_may_import_when_hetpeer_no_longer_looks(tmp_path: Path) -> None:
    """As the `forward` of a model does while it is traced."""
    text = "def later():\n    from aside import VALUE\n    return VALUE\ndef data():\n    yield later\n"
    written(tmp_path, aside=VALUE, mine=text)
    (later,) = samples(tmp_path / "mine.py")
    assert callable(later)
    assert later() == 7


def test_a_package_with_the_name_of_one_that_is_imported_is_none(tmp_path: Path) -> None:
    """A copy of hetpeer's examples must not replace hetpeer."""
    package(tmp_path / "hetpeer")
    written(tmp_path, hetpeer__mine="def data():\n    yield 7\n")
    before = sys.modules["hetpeer"]
    assert samples(tmp_path / "hetpeer" / "mine.py") == [7]
    assert sys.modules["hetpeer"] is before


def test_a_missing_import_is_named_with_its_line(tmp_path: Path) -> None:
    written(tmp_path, mine=LATE.format("nowhere_at_all"))
    with pytest.raises(LocalError) as caught:
        samples(tmp_path / "mine.py")
    assert caught.value.code == "HP-DATA-004"
    assert "No module named 'nowhere_at_all' (mine.py, line 2)" in caught.value.line()
