"""Small models of transformers for `make zoo` as `hetpeer init` prepares them, each with a microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_table import SETTINGS, SIZES
from hetpeer.bootstrap.authoring.user_code import with_loss
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt
from hetpeer.bootstrap.pretrained.load import without_cache

SAMPLES, LENGTH, PADDED = 4, 16, 4

Data = dict[str, Tensor]


def make(name: str, task: str) -> tuple[nn.Module, Data]:
    """A small model of an architecture as a function of its arrays that returns the loss, and a microbatch.

    It keeps no cache and its forward has the arrays' names, as in a run of a user.
    """
    import transformers

    auto, data, usual = TASKS[task]
    own = {**usual, **SETTINGS.get(name, {}), **SETTINGS.get(f"{name}:{task}", {})}
    config = small(transformers.CONFIG_MAPPING[name], own)
    torch.manual_seed(0)
    loader = getattr(transformers, CLASSES.get(name, auto) if task == "series" else auto)
    # from_config keeps and changes the configuration that it gets
    kept = copy.deepcopy(config)
    model = loader.from_config(kept) if hasattr(loader, "from_config") else loader(kept)
    without_cache(model)
    if task in ADAPTERS:
        adapt(model, LoraSettings.parse(ADAPTERS[task]))
    elif task == "contrast":
        model = _Contrast(model)
    microbatch = data(config)
    return with_loss(model, None, microbatch), microbatch


def small(kind: type[Any], own: Mapping[str, Any]) -> Any:
    """A new small configuration of a class: `SIZES` where it has them, then `own`.

    A value `...` leaves a setting out.
    """
    usual = kind()
    settings = {
        name: size for name, size in SIZES.items() if isinstance(getattr(usual, name, None), (int, float))
    }
    for name, part in vars(usual).items():
        if hasattr(part, "to_dict"):
            settings[name] = small(type(part), own.get(name, {})).to_dict()
    return kind(**{name: value for name, value in (settings | own).items() if value is not ...})


class _Contrast(nn.Module):
    """A model of two senses that is asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


# ── Microbatches ───────────────────────────────────────────────────────────────────────────────────────────


def _tokens() -> Tensor:
    return torch.randint(3, 128, (SAMPLES, LENGTH))


def _with_padding(arrays: Data) -> Data:
    """The arrays with a mask, the last sample's end padded as texts of several lengths are."""
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[-1, -PADDED:] = 0
    labels = arrays["labels"]
    if labels.shape == mask.shape:
        labels = labels.where(mask == 1, -100)
    return {**arrays, "attention_mask": mask, "labels": labels}


def _causal(_: Any) -> Data:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked(_: Any) -> Data:
    return _with_padding(_causal(_))


def _seq2seq(_: Any) -> Data:
    return _with_padding({"input_ids": _tokens(), "labels": _tokens()})


def _sequence(_: Any) -> Data:
    return _with_padding({"input_ids": _tokens(), "labels": torch.arange(SAMPLES) % 2})


def _per_token(_: Any) -> Data:
    return _with_padding({"input_ids": _tokens(), "labels": _tokens() % 2})


def _answers(_: Any) -> Data:
    ends = torch.arange(SAMPLES)
    return {"input_ids": _tokens(), "start_positions": ends, "end_positions": ends + 3}


def _pixels(config: Any) -> Tensor:
    size = getattr(config, "image_size", 32)
    return torch.randn(SAMPLES, 3, *(size if isinstance(size, (list, tuple)) else (size, size)))


def _image(config: Any) -> Data:
    return {"pixel_values": _pixels(config), "labels": torch.arange(SAMPLES) % 2}


def _audio(config: Any) -> Data:
    values = torch.randn(SAMPLES, config.max_length, config.num_mel_bins)
    return {"input_values": values, "labels": torch.arange(SAMPLES) % 2}


def _ctc(_: Any) -> Data:
    return {"input_values": torch.randn(SAMPLES, 4000), "labels": torch.randint(3, 30, (SAMPLES, 4))}


def _speech(config: Any) -> Data:
    frames = 2 * config.max_source_positions
    shape = (config.num_mel_bins, frames) if config.model_type == "whisper" else (frames, 80)
    return {"input_features": torch.randn(SAMPLES, *shape), "labels": _tokens()}


def _raw_speech(_: Any) -> Data:
    return {"input_values": torch.randn(SAMPLES, 4000), "labels": _tokens()}


def _contrast(config: Any) -> Data:
    return {"input_ids": _tokens(), "pixel_values": _pixels(config.vision_config)}


def _series(config: Any) -> Data:
    past = torch.randn(SAMPLES, config.context_length, config.num_input_channels)
    return {
        "past_values": past,
        "future_values": torch.randn(SAMPLES, config.prediction_length, past.shape[2]),
    }


def _image_text(config: Any) -> Data:
    tokens = torch.randint(3, config.image_token_id, (SAMPLES, 2 * LENGTH))
    vision = config.vision_config
    tokens[:, : (vision.image_size // vision.patch_size) ** 2] = config.image_token_id
    return {"input_ids": tokens, "pixel_values": _pixels(vision), "labels": tokens.clone()}


def _pretraining(config: Any) -> Data:
    if config.model_type == "videomae":
        patches = (config.image_size // config.patch_size) ** 2 * config.num_frames // config.tubelet_size
        video = torch.randn(SAMPLES, config.num_frames, 3, config.image_size, config.image_size)
        mask = torch.zeros(SAMPLES, patches, dtype=torch.bool)
        mask[:, ::2] = True
        return {"pixel_values": video, "bool_masked_pos": mask}
    return {"pixel_values": _pixels(config)}


TASKS: Mapping[str, tuple[str, Callable[[Any], Data], Mapping[str, Any]]] = {
    "causal": ("AutoModelForCausalLM", _causal, {}),
    "masked": ("AutoModelForMaskedLM", _masked, {}),
    "seq2seq": ("AutoModelForSeq2SeqLM", _seq2seq, {"decoder_start_token_id": 0}),
    "image": ("AutoModelForImageClassification", _image, {"num_labels": 2}),
    "audio": ("AutoModelForAudioClassification", _audio, {"num_labels": 2, "max_length": 64}),
    "ctc": ("AutoModelForCTC", _ctc, {"ctc_zero_infinity": True, "mask_time_prob": 0.0}),
    "speech": ("AutoModelForSpeechSeq2Seq", _speech, {}),
    "raw-speech": ("AutoModelForSpeechSeq2Seq", _raw_speech, {}),
    "contrast": ("AutoModel", _contrast, {}),
    "series": ("AutoModel", _series, {"context_length": 32, "prediction_length": 8, "num_input_channels": 2}),
    "image-text": ("AutoModelForImageTextToText", _image_text, {}),
    "pretraining": ("AutoModelForPreTraining", _pretraining, {}),
    "sequence": ("AutoModelForSequenceClassification", _sequence, {"num_labels": 2}),
    "tokens": ("AutoModelForTokenClassification", _per_token, {"num_labels": 2}),
    "answers": ("AutoModelForQuestionAnswering", _answers, {}),
    "lora": ("AutoModelForCausalLM", _causal, {}),
    "dora": ("AutoModelForCausalLM", _causal, {}),
}
"""Task → the class of transformers, a microbatch for a configuration, settings."""
CLASSES = {"patchtst": "PatchTSTForPrediction", "patchtsmixer": "PatchTSMixerForPrediction"}
"""Architecture → its class for a time series, for which there is no common one."""
ADAPTERS = {"lora": "r=4,dropout=0.1", "dora": "r=4,dropout=0.1,dora"}
"""Task → `--lora`."""
