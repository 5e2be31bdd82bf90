"""Images in a folder of classes: one sub-folder for each class, as torchvision's ImageFolder has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.samples.record import bad_record
from hetpeer.dht.base.errors import ExitCode, LocalError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
TRAINED, EVALUATED = ("train", "training"), ("val", "valid", "validation", "eval", "test")
"""Names of the parts that a folder may have, the first that is there counts."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The images of some folders and the class of each, in the order of the classes and their names.

    ImageFolder.read([Path("flowers")], print).classes  # ("daisy", "rose")
    """

    classes: tuple[str, ...]
    """Names of the classes, sorted."""
    files: Sequence[tuple[Path, str]]
    """Image and the name of its class."""

    @classmethod
    def read(cls, paths: Sequence[Path], tell: Callable[[str], None]) -> ImageFolder:
        """The images under `paths`; `tell` gets a line about other files, which are left out.

        Raises `LocalError` HP-DATA-001 for a path that is no folder or cannot be read, HP-DATA-008 for a
        folder without sub-folders, or a class without images.
        """
        files: dict[str, list[Path]] = {}
        for path in paths:
            others = Counter[str]()
            folders = _folders(path)
            if not folders:
                raise bad_record(
                    str(path),
                    "it has no sub-folders, and the images of each class are read from a folder of its own",
                    "make one folder for each class, or give --data FILE.PY:FUNCTION",
                )
            for folder in folders:
                found = [file for file in sorted(folder.rglob("*")) if _is_shown(file, folder)]
                images = [file for file in found if file.suffix.lower() in SUFFIXES]
                if not images:
                    raise bad_record(
                        str(folder),
                        "it is the folder of a class, and has no image",
                        "put images into it, or remove it",
                    )
                files.setdefault(folder.name, []).extend(images)
                others.update(file.suffix for file in found if file.suffix.lower() not in SUFFIXES)
            if others:
                names = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
                tell(f"files of {path} in other formats are left out: {names}")
        return cls(tuple(sorted(files)), [(file, name) for name in sorted(files) for file in files[name]])

    def labelled(self, ids: Mapping[str, int]) -> list[tuple[Path, int]]:
        """Each image and its class as a number.

        Raises `LocalError` HP-DATA-008 for a class that `ids` lacks.
        """
        for file, name in self.files:
            if name not in ids:
                raise bad_record(
                    str(file),
                    f"its class {name!r} is none of those of the training data",
                    "give the folders of both data the same names",
                )
        return [(file, ids[name]) for file, name in self.files]


def parts_of(path: Path) -> tuple[Path, Path | None]:
    """The folders of the training and the evaluation data under `path`; None: there are none of the latter.

    A folder without `train` is training data itself.
    """
    trained, evaluated = (
        next((path / name for name in names if (path / name).is_dir()), None)
        for names in (TRAINED, EVALUATED)
    )
    return (path, None) if trained is None else (trained, evaluated)


def _folders(path: Path) -> list[Path]:
    try:
        return [one for one in sorted(path.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    except OSError as error:
        raise LocalError(
            "HP-DATA-001",
            f"cannot read {path}",
            why=f"{error.strerror or error}",
            fix="give a folder with one sub-folder of images for each class",
            exit_code=ExitCode.CONFIG,
        ) from error


def _is_shown(file: Path, folder: Path) -> bool:
    """Whether `file` is a file, and neither it nor a folder between is hidden."""
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
