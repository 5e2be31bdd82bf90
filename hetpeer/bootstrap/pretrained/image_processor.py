"""The image processor of a model of transformers: how its images are resized, cut and scaled.

Pixels are stored as uint8, a quarter of float32, if the processor's last two steps are one factor and one
offset for each channel: then the model does these itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetpeer.bootstrap.pretrained.load import library, library_errors, other_file, where_from
from hetpeer.bootstrap.pretrained.source import ModelSource, not_loaded
from hetpeer.bootstrap.samples.image_samples import PIXELS, Preparation
from hetpeer.bootstrap.samples.record import not_installed
from hetpeer.stages.data.shards import Array

FILES = ("preprocessor_config.json", "processor_config.json")
"""A model with one of these says how its images are prepared."""
TRIED = (61, 83)
"""Height and width of an image on which the scaling is tried."""
TOLERANCE = 1e-5
"""Largest difference of scaled pixels that counts as rounding."""


def image_processor(source: ModelSource, config: Any) -> tuple[Any, bool]:
    """The processor, and whether it lies beside the model; if not, it is that of the model's kind.

    Its backend is Pillow's, which needs no torchvision. Raises `LocalError` HP-MODEL-012 if there is none,
    HP-SYS-006 without Pillow.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise not_installed("the reader of images", "pillow") from error
    with library_errors(source):
        if any(other_file(source, name) for name in FILES):
            kind = library().AutoImageProcessor
            return kind.from_pretrained(source.name, backend="pil", **where_from(source)), True
        known = library().models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING
        try:
            own = known[type(config)]["pil"]
        except (KeyError, TypeError) as error:
            raise not_loaded(
                source.reference,
                "it has no preprocessor_config.json, which says how its images are resized and scaled",
                "copy that file into the folder, or give --data FILE.PY:FUNCTION",
            ) from error
        size = getattr(config, "image_size", None)
        if not isinstance(size, int):
            return own(), False
        square = {"height": size, "width": size}
        cut = {"crop_size": square} if getattr(own, "crop_size", None) else {}
        return own(size=square, **cut), False


def preparation(processor: Any, channels: int) -> Preparation:
    """The `Preparation` that `processor` stands for, for images of 1 or 3 channels."""
    mode = "L" if channels == 1 else "RGB"

    def unscaled(image: Any) -> Array:
        return _pixels(processor, image, do_rescale=False, do_normalize=False)

    def scaled(image: Any) -> Array:
        return _pixels(processor, image).astype(np.float32, copy=False)

    rescaled = getattr(processor, "do_rescale", None)
    scale = np.full(channels, processor.rescale_factor if rescaled else 1.0)
    offset = np.zeros(channels)
    if getattr(processor, "do_normalize", None):
        mean, deviation = np.array(processor.image_mean), np.array(processor.image_std)
        scale, offset = scale / deviation, offset - mean / deviation
    tried = _image(mode)
    raw, wanted = unscaled(tried), scaled(tried)
    per_channel = (channels, 1, 1)
    ours = raw.astype(np.float32) * scale.reshape(per_channel) + offset.reshape(per_channel)
    if raw.dtype != np.uint8 or ours.shape != wanted.shape or np.abs(ours - wanted).max() > TOLERANCE:
        return Preparation(scaled, mode)
    return Preparation(unscaled, mode, tuple(map(float, scale)), tuple(map(float, offset)))


def _pixels(processor: Any, image: Any, **options: bool) -> Array:
    """Array [channels, height, width] of Pillow's `image`."""
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    found: Array = processor(array, return_tensors="np", input_data_format="channels_last", **options)[
        PIXELS
    ][0]
    return np.ascontiguousarray(found)


def _image(mode: str) -> Any:
    """An image with all shades."""
    from PIL import Image

    shades = np.random.default_rng(0).integers(0, 256, (*TRIED, 3), dtype=np.uint8)
    return Image.fromarray(shades).convert(mode)
