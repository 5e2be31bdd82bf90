"""Tasks for which a model of transformers can be trained, each with the loss of its own class."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Task(enum.StrEnum):
    """Task of a model: it selects the class of transformers, and with it the head and the loss."""

    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ = "seq2seq"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105 - no password
    IMAGE_CLASSIFICATION = "image-classification"


AUTO_CLASSES: Mapping[Task, str] = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.SEQ2SEQ: "AutoModelForSeq2SeqLM",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
}
"""Task → class of transformers that finds the model's own class."""
ARRAYS: Mapping[Task, str] = {
    Task.CAUSAL_LM: "input_ids and labels",
    Task.MASKED_LM: "input_ids, attention_mask and labels",
    Task.SEQ2SEQ: "input_ids, attention_mask and labels",
    Task.SEQUENCE_CLASSIFICATION: "input_ids, attention_mask and labels",
    Task.TOKEN_CLASSIFICATION: "input_ids, attention_mask and labels",
    Task.IMAGE_CLASSIFICATION: "pixel_values and labels",
}
"""Task → arrays of a sample."""
OF_TEXTS = (Task.CAUSAL_LM, Task.MASKED_LM)
"""Tasks whose samples are made of texts and chats alone."""
LABEL_FIELDS: Mapping[Task, str] = {Task.SEQUENCE_CLASSIFICATION: "label", Task.SEQ2SEQ: "target"}
"""Tasks whose samples are made of records with a text and a label → the usual name of the label's field."""
HEADS = (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.IMAGE_CLASSIFICATION)
"""Tasks whose last layer depends on the classes: it begins at random if the checkpoint has none."""
