"""Images of a folder of classes: what samples become of them, what the model and its export know of them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.pretrained.formats import Dtype, Format
from hetpeer.bootstrap.pretrained.image_processor import preparation
from hetpeer.bootstrap.results.export import current_model, export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.samples.image_folder import ImageFolder
from hetpeer.bootstrap.samples.image_samples import AHEAD, Preparation, image_samples, plain
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.dht.base.errors import ExitCode, LocalError
from tests.bootstrap.engine import TRAINING
from tests.bootstrap.pretrained_models import vit
from tests.bootstrap.test_create import assert_fails
from tests.bootstrap.test_run_data import arrays_of

CLASSES = ("daisy", "rose", "tulip")
PROCESSORS = ("ViT", "ConvNext", "DeiT", "MobileNetV2", "MobileViT", "Siglip", "EfficientNet")


def picture(number: int, height: int = 12, width: int = 9) -> Image.Image:
    shades = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(shades)


def flowers(
    folder: Path, classes: Sequence[str] = CLASSES, each: int = 4, suffixes: Sequence[str] = (".png", ".webp")
) -> Path:
    """A folder with `each` images for each class, in a lossless form, some in a folder within the class's."""
    for at, name in enumerate(classes):
        for number in range(each):
            inner = folder / name / ("more" if number == 1 else "")
            inner.mkdir(parents=True, exist_ok=True)
            picture(100 * at + number).save(
                inner / f"{number}{suffixes[number % len(suffixes)]}", lossless=True
            )
    return folder


def made(tmp_path: Path, data: Path, model: str = "", **options: Any) -> RunDirectory:
    return create_run(
        tmp_path / "run",
        model=model or f"hf:{vit(tmp_path / 'model')}",
        data=[data],
        training=TRAINING,
        **options,
    )


def with_processor(folder: Path, **settings: Any) -> Path:
    sizes = {"size": {"height": 8, "width": 8}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil(
        **sizes, **settings
    ).save_pretrained(folder)
    return folder


def test_samples_are_what_the_models_processor_makes_at_a_quarter_of_the_size(tmp_path: Path) -> None:
    model = with_processor(vit(tmp_path / "model"))
    said: list[str] = []
    run = made(tmp_path, flowers(tmp_path / "flowers"), f"hf:{model}", tell=said.append)
    arrays = arrays_of(run)
    assert (arrays["pixel_values"].dtype, arrays["pixel_values"].shape) == (np.uint8, (12, 3, 8, 8))
    assert sorted(arrays["labels"]) == sorted([0, 1, 2] * 4)
    assert "the model's classes are now called daisy, rose, tulip" in said
    processor = transformers.AutoImageProcessor.from_pretrained(model)
    own = transformers.AutoModelForImageClassification.from_pretrained(model).eval()
    expected = {}
    for file, name in ImageFolder.read([tmp_path / "flowers"], print).files:
        inputs = processor(Image.open(file), return_tensors="pt")
        raw = processor(Image.open(file), return_tensors="np", do_rescale=False, do_normalize=False)
        with torch.no_grad():
            loss = own(**inputs, labels=torch.tensor([CLASSES.index(name)])).loss
        expected[raw["pixel_values"].tobytes()] = float(loss), CLASSES.index(name)
    found = [expected[pixels.tobytes()] for pixels in arrays["pixel_values"]]
    assert [label for _, label in found] == [*arrays["labels"]]


def test_the_trained_graph_scales_as_the_processor_does(tmp_path: Path) -> None:
    """The first block gets uint8, and its loss is that of the model with the processor's own float32."""
    from hetpeer.bootstrap.authoring.loss_module import objective, with_scaled_pixels

    model = with_processor(vit(tmp_path / "model"))
    processor = transformers.AutoImageProcessor.from_pretrained(model)
    own = transformers.AutoModelForImageClassification.from_pretrained(model).eval()
    images = [picture(number) for number in range(4)]
    labels = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        wanted = own(**processor(images, return_tensors="pt"), labels=labels).loss
        prepared = preparation(processor, 3)
        pixels = torch.from_numpy(np.stack([prepared.pixels(image) for image in images]))
        scaled = objective(
            with_scaled_pixels(own, prepared.scale, prepared.offset), None, ["labels", "pixel_values"]
        )
        assert pixels.dtype == torch.uint8
        assert torch.allclose(scaled(pixel_values=pixels, labels=labels), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", PROCESSORS)
def test_scaling_is_the_processors_or_is_left_to_it(name: str) -> None:
    kind = getattr(transformers, f"{name}Config")
    processor = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING[kind]["pil"]()
    prepared, image = preparation(processor, 3), picture(7, 50, 70)
    pixels = prepared.pixels(image)
    if prepared.scale:
        shape = (3, 1, 1)
        pixels = pixels * np.reshape(prepared.scale, shape) + np.reshape(prepared.offset, shape)
    else:
        assert pixels.dtype == np.float32
    assert bool(prepared.scale) == (name != "EfficientNet")
    wanted = processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels, wanted, atol=1e-5)


def test_the_export_knows_the_classes_and_how_images_are_prepared(tmp_path: Path) -> None:
    said: list[str] = []
    run = made(tmp_path, flowers(tmp_path / "flowers"), tell=said.append)
    assert any("no preprocessor_config.json: images are resized to 8 x 8" in line for line in said)
    export(run.path, tmp_path / "out", Format.HF, Dtype.FLOAT32)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    assert loaded.config.label2id == {name: number for number, name in enumerate(CLASSES)}
    own = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert dict(processor.size) == {"height": 8, "width": 8}


def test_the_newest_model_takes_samples_as_they_are_stored(tmp_path: Path) -> None:
    """A function of `hetpeer watch --score` gets both."""
    model = with_processor(vit(tmp_path / "model"))
    run = made(tmp_path, flowers(tmp_path / "flowers"), f"hf:{model}")
    arrays = {name: torch.from_numpy(array) for name, array in arrays_of(run).items()}
    processor = transformers.AutoImageProcessor.from_pretrained(model)
    prepared = preparation(processor, 3)
    scale, offset = (torch.tensor(numbers).reshape(3, 1, 1) for numbers in (prepared.scale, prepared.offset))
    own = transformers.AutoModelForImageClassification.from_pretrained(model).eval()
    with torch.no_grad():
        wanted = own(pixel_values=arrays["pixel_values"] * scale + offset).logits
        found = current_model(run)(pixel_values=arrays["pixel_values"]).logits
    torch.testing.assert_close(found, wanted)


def test_the_models_own_numbers_stay_if_it_knows_the_names(tmp_path: Path) -> None:
    folder = vit(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.id2label = {0: "tulip", 1: "daisy", 2: "rose"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.save_pretrained(folder)
    run = made(tmp_path, flowers(tmp_path / "flowers", ("daisy", "tulip")), f"hf:{folder}")
    assert sorted({*arrays_of(run)["labels"]}) == [0, 1]


def test_parts_train_and_val(tmp_path: Path) -> None:
    flowers(tmp_path / "flowers" / "train")
    flowers(tmp_path / "flowers" / "val", each=2)
    (tmp_path / "flowers" / ".cache").mkdir()
    run = made(tmp_path, tmp_path / "flowers")
    assert sum(shard.samples for shard in run.manifest.data.train) == 12
    assert sum(shard.samples for shard in run.manifest.data.heldout) == 6
    assert run.manifest.training.eval_samples == 6


def test_order_follows_from_the_seed_and_max_samples_are_of_all_classes(tmp_path: Path) -> None:
    files = ImageFolder.read([flowers(tmp_path / "flowers", each=10)], print).labelled(
        {name: number for number, name in enumerate(CLASSES)}
    )

    def labels(seed: int, most: int | None = None) -> list[int]:
        found = image_samples(files, plain(4), seed, most, Progress(print))
        return [int(sample["labels"]) for sample in found]

    assert labels(1) == labels(1) != labels(2)
    assert sorted(labels(1)) == sorted(label for _, label in files)
    assert labels(1, 12) == labels(1)[:12]
    assert {*labels(1, 12)} == {0, 1, 2}


def test_few_images_are_in_memory_and_closing_ends_the_threads(tmp_path: Path) -> None:
    files = [(file, 0) for file, _ in ImageFolder.read([flowers(tmp_path / "a", ["x"], 200)], print).files]
    read: list[Any] = []

    def pixels(image: Any) -> Any:
        read.append(1)
        return np.zeros((3, 1, 1), dtype=np.uint8)

    found = image_samples(files, Preparation(pixels), 0, None, Progress(print))
    for _ in range(10):
        next(found)
    found.close()
    assert len(read) <= 10 + AHEAD * (os.cpu_count() or 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("image")]


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3 * 4 * 4, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, pixel_values, labels):
        assert pixel_values.dtype == torch.float32
        hidden = self.first(pixel_values.flatten(1)).relu()
        return torch.nn.functional.cross_entropy(self.second(hidden), labels)

def build():
    return Net()
"""


def test_a_model_of_ones_own_gets_squares(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN)
    data = flowers(tmp_path / "flowers")
    run = made(tmp_path, data, f"{tmp_path / 'net.py'}:build", reading=DataOptions(image_size=4))
    pixels = arrays_of(run)["pixel_values"]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (12, 3, 4, 4))


def test_an_image_on_its_side_stands_up_and_grey_and_transparent_ones_have_three_colours(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a" / "x"
    folder.mkdir(parents=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(1, 6, 4).save(folder / "a.png", exif=turned)
    picture(2, 4, 6).convert("L").save(folder / "b.png")
    picture(3, 4, 6).convert("RGBA").save(folder / "c.png")
    picture(4, 4, 6).convert("P").save(folder / "d.gif")
    files = [(file, 0) for file, _ in ImageFolder.read([tmp_path / "a"], print).files]
    found = {
        sample["pixel_values"].tobytes()
        for sample in image_samples(files, plain(None), 0, None, Progress(print))
    }
    upright = np.asarray(picture(1, 6, 4).rotate(-90, expand=True)).transpose(2, 0, 1)
    assert len(found) == 4
    assert upright.tobytes() in found


@pytest.mark.parametrize("kind", ["text", "cut", "deep"])
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    data = flowers(tmp_path / "flowers")
    broken = data / "rose" / "broken.png"
    picture(1, 40, 40).save(broken)
    if kind == "text":
        broken.write_text("no image")
    elif kind == "cut":
        broken.write_bytes(broken.read_bytes()[:1000])
    elif kind == "deep":
        Image.fromarray(np.full((12, 9), 40000, dtype=np.uint16)).save(broken)
    model = f"hf:{vit(tmp_path / 'model')}"
    error = assert_fails(
        tmp_path, "HP-DATA-008", ExitCode.CONFIG, model=model, data=[data], training=TRAINING
    )
    assert error.what == f"cannot use {broken}"


def test_images_of_two_sizes_without_one_for_all(tmp_path: Path) -> None:
    data = flowers(tmp_path / "flowers")
    picture(1, 5, 40).save(data / "rose" / "wide.png")
    files = [(file, 0) for file, _ in ImageFolder.read([data], print).files]
    with pytest.raises(
        LocalError, match=r"HP-DATA-008.*by 12 pixels.*40 by 5|HP-DATA-008.*40 by 5 pixels"
    ) as caught:
        [*image_samples(files, plain(None), 0, None, Progress(print))]
    assert caught.value.fix == "give --image-size N, or images of one size"
    assert len([*image_samples(files, plain(4), 0, None, Progress(print))]) == 13


@pytest.mark.parametrize(
    ("classes", "code", "why"),
    [
        (("a", "b"), "HP-DATA-010", "a, b"),
        (("a", "b", "c", "d"), "HP-DATA-010", "a, b, c, d"),
        ((), "HP-DATA-008", "no sub-folders"),
    ],
)
def test_folders_that_are_not_the_models_classes(
    tmp_path: Path, classes: Sequence[str], code: str, why: str
) -> None:
    data = flowers(tmp_path / "flowers", classes)
    data.mkdir(exist_ok=True)
    model = f"hf:{vit(tmp_path / 'model')}"
    error = assert_fails(tmp_path, code, ExitCode.CONFIG, model=model, data=[data], training=TRAINING)
    assert why in error.why


def test_a_class_without_images_and_one_that_is_only_evaluated(tmp_path: Path) -> None:
    said: list[str] = []
    data = flowers(tmp_path / "flowers")
    (data / "rose" / "notes.txt").write_text("x")
    ImageFolder.read([data], said.append)
    assert said == [f"files of {data} in other formats are left out: 1 .txt"]
    (data / "empty").mkdir()
    with pytest.raises(LocalError, match=r"HP-DATA-008.*empty"):
        ImageFolder.read([data], print)
    with pytest.raises(LocalError, match=r"HP-DATA-008.*'rose' is none of those of the training data"):
        ImageFolder.read([flowers(tmp_path / "other")], print).labelled({"daisy": 0})


def test_a_processor_that_cannot_prepare_an_image(tmp_path: Path) -> None:
    model = with_processor(vit(tmp_path / "model"), do_normalize=True)
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"image_std": [0.5, 0.5]}))
    data = [flowers(tmp_path / "flowers")]
    assert_fails(tmp_path, "HP-MODEL-012", ExitCode.CONFIG, model=f"hf:{model}", data=data, training=TRAINING)


@pytest.mark.parametrize("option", [{"packed": True}, {"image_size": 4}, {"text_field": "x"}])
def test_options_that_images_do_not_have(tmp_path: Path, option: dict[str, Any]) -> None:
    assert_fails(
        tmp_path,
        "HP-RUN-001",
        ExitCode.CONFIG,
        model=f"hf:{vit(tmp_path / 'model')}",
        data=[flowers(tmp_path / "flowers")],
        training=TRAINING,
        reading=DataOptions(**option),
    )
