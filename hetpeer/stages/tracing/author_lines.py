"""The author's own line in a traceback: not one of torch, of another library, or of hetpeer.

hetpeer's examples count as an author's code.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).parents[2]
_EXAMPLES = _OURS / "examples"
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def author_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the author's code in `error`'s traceback, else of a library that it called.

    None if there are only frames of torch and hetpeer.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return next((one for one in reversed(frames) if is_author(one.filename)), None) or next(
        (one for one in reversed(frames) if not _is_machinery(Path(one.filename))), None
    )


def is_author(file: str) -> bool:
    """Whether a source file is the author's."""
    path = Path(file)
    if _EXAMPLES in path.parents:
        return True
    return not _is_machinery(path) and not any(library in path.parents for library in _LIBRARIES)


def _is_machinery(path: Path) -> bool:
    """Whether code in this file is ours, torch's or the interpreter's own."""
    if path.name.startswith("<") or str(path).startswith("<"):
        return True
    torch = importlib.util.find_spec("torch")
    homes = [_OURS, *([Path(torch.origin).parent] if torch is not None and torch.origin else [])]
    return any(home in path.parents for home in homes) and _EXAMPLES not in path.parents
