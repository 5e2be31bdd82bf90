"""CTC losses: padded targets of one's own, those of transformers, and what the operator refuses."""

import pytest
import torch
from torch import nn

from hetpeer.bootstrap.authoring.user_code import with_loss
from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.stages.operators.ctc_loss import ctc_loss
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")


class Heard(nn.Module):
    """Logits of ten frames, and targets with a length each."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x, targets, lengths):
        frames = self.head(x).log_softmax(-1).transpose(0, 1)
        full = torch.full_like(lengths, 10)
        return nn.functional.ctc_loss(frames, targets, full, lengths, zero_infinity=True)


def heard(samples):
    targets = torch.randint(1, 6, (samples, 3))
    return {"x": torch.randn(samples, 10, 4), "targets": targets, "lengths": torch.arange(samples) % 3 + 1}


def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        mask_time_prob=0.0,
        feat_proj_dropout=0.0,
    )
    return with_loss(Wav2Vec2ForCTC(config), None, ("input_values", "labels"))


def spoken(samples):
    labels = torch.randint(1, 12, (samples, 4))
    labels[0, 1] = labels[-1, 3] = -100
    return {"input_values": torch.randn(samples, 200), "labels": labels}


def test_a_ctc_loss_is_the_eager_one():
    torch.manual_seed(5)
    model, batches = Heard(), [heard(4), heard(3)]
    dag = trace(model, batches[0])
    assert dag.dynamic
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)


def test_wav2vec2_is_the_eager_one():
    torch.manual_seed(5)
    model, batch = wav2vec2(), spoken(4)
    dag = trace(model, batch)
    assert dag.dynamic
    loss, gradient = check_likeness(model, batch, dag, cut_blocks(dag)).worst()
    assert loss < 1e-6
    assert gradient < 1e-4


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"targets": torch.tensor([[1, 6]])}, IndexError, "6 is not between 0 and 5"),
        ({"targets": torch.tensor([[-1, 2]])}, IndexError, "-1 is not between 0 and 5"),
        ({"input_lengths": torch.tensor([11])}, IndexError, "11 is not between 0 and 10"),
        ({"target_lengths": torch.tensor([3])}, IndexError, "3 is not between 0 and 2"),
        ({"target_lengths": torch.tensor([2, 2])}, ValueError, "two \\[samples\\]"),
        ({"blank": 6}, ValueError, "class of blanks"),
        ({"targets": torch.ones(1, 1 << 24).long()}, ValueError, "keeps at most"),
    ],
)
def test_what_would_read_beyond_or_cost_too_much_is_refused(changed, error, says):
    usual = {
        "log_probs": torch.zeros(10, 1, 6),
        "targets": torch.tensor([[1, 2]]),
        "input_lengths": torch.tensor([10]),
        "target_lengths": torch.tensor([2]),
        "blank": 0,
        "zero_infinity": True,
    }
    assert ctc_loss(**usual).shape == (1,)
    with pytest.raises(error, match=says):
        ctc_loss(**usual | changed)


def test_targets_behind_their_length_do_not_count():
    frames = torch.randn(10, 1, 6).log_softmax(-1)
    lengths = torch.tensor([10]), torch.tensor([1])
    found = [ctc_loss(frames, torch.tensor([[1, more]]), *lengths, 0, False) for more in (2, -100)]
    assert found[0].equal(found[1])
