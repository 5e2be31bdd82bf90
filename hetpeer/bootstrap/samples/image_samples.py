"""Samples of images, decoded in parallel. The only module here that imports Pillow, from the extra `hf`.

A sample has `pixel_values` [channels, height, width] and `labels`, its class, int64 [].
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.bootstrap.samples.image_folder import ImageFolder
from hetpeer.bootstrap.samples.packing import LABELS
from hetpeer.bootstrap.samples.record import Progress, bad_record, not_installed
from hetpeer.stages.data.microbatches import FILES_STREAM, permutation
from hetpeer.stages.data.shards import Array, Arrays

PIXELS = "pixel_values"
AHEAD = 4
"""Images for each core that are decoded before they are needed: the bound of memory."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """How an image becomes an array, and how the model scales that array."""

    pixels: Callable[[Any], Array]
    """Pillow's image → array [channels, height, width]."""
    mode: str = "RGB"
    """Pillow's mode of the images that `pixels` gets."""
    scale: tuple[float, ...] = ()
    """Factor of each channel; empty: the array is what the model takes."""
    offset: tuple[float, ...] = ()
    """Number that is added to each channel after that."""
    fix: str = "give images of one size"
    """Advice if images do not become arrays of one size."""


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images of a run and how they are prepared."""

    trained: ImageFolder
    evaluated: ImageFolder | None
    """Evaluation data; None: a part of the others is held out."""
    ids: Mapping[str, int]
    """Name of a class → its number."""
    preparation: Preparation


def plain(size: int | None) -> Preparation:
    """Images as uint8 [3, height, width], which the model gets as float32 from 0 to 1.

    `size`: the shorter edge becomes as long, and the middle is cut out as a square; None: images stay as
    they are.
    """

    def pixels(image: Any) -> Array:
        if size is not None:
            from PIL import ImageOps

            image = ImageOps.fit(image, (size, size), _bilinear())
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    third = (1 / 255,) * 3
    return Preparation(
        pixels, scale=third, offset=(0.0,) * 3, fix="give --image-size N, or images of one size"
    )


def image_samples(
    files: Sequence[tuple[Path, int]],
    preparation: Preparation,
    seed: int,
    most: int | None,
    progress: Progress,
) -> Iterator[Arrays]:
    """One sample for each file and its class, shuffled by `seed`; at most `most`.

    Raises `LocalError` HP-DATA-008 for an image that cannot be read or has another size than the first one,
    HP-SYS-006 without Pillow.
    """
    try:
        import PIL.Image  # noqa: F401 - better now than in a thread
    except ImportError as error:
        raise not_installed("the reader of images", "pillow") from error
    # Pillow warns of damaged metadata of good images. The threads share all filters.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    order = permutation(seed, FILES_STREAM, len(files))[:most]
    progress.total = len(order)
    shape: tuple[int, ...] = ()
    for number, pixels in zip(order, _decoded([files[at][0] for at in order], preparation), strict=True):
        path, label = files[number]
        shape = shape or pixels.shape
        if pixels.shape != shape:
            raise bad_record(
                str(path),
                f"it has {pixels.shape[2]} by {pixels.shape[1]} pixels, and another image {shape[2]} by "
                f"{shape[1]}",
                preparation.fix,
            )
        progress.read += 1
        yield {PIXELS: pixels, LABELS: np.array(label, dtype=np.int64)}


def _decoded(paths: Sequence[Path], preparation: Preparation) -> Iterator[Array]:
    """The images of `paths`, in order, AHEAD for each core in memory."""
    cores = os.cpu_count() or 1
    waiting = deque[Future[Array]]()
    left = iter(paths)
    pool = ThreadPoolExecutor(cores, thread_name_prefix="image")
    try:
        while True:
            for path in itertools.islice(left, cores * AHEAD - len(waiting)):
                waiting.append(pool.submit(_read, path, preparation))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read(path: Path, preparation: Preparation) -> Array:
    """The array of one image. Raises `LocalError` HP-DATA-008."""
    from PIL import Image, ImageOps

    why, fix = "it has more than 8 bits a colour", "save it with 8 bits a colour"
    try:
        with Image.open(path) as image:
            if image.mode[0] not in "IF":
                return preparation.pixels(ImageOps.exif_transpose(image).convert(preparation.mode))
    except Exception as error:  # noqa: BLE001 - Pillow's many decoders raise anything
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        why, fix = f"it is no whole image: {text}", "mend the file, or remove it"
    raise bad_record(str(path), why, fix)


def _bilinear() -> Any:
    from PIL import Image

    return Image.Resampling.BILINEAR
