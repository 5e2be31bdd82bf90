"""Tokens arrive one by one, and nothing computes on when nobody reads."""

from __future__ import annotations

from threading import Semaphore, active_count
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpeer.bootstrap.results import token_stream
from hetpeer.bootstrap.results.token_stream import streamed

transformers = pytest.importorskip("transformers")
PROMPT = [3, 1, 4]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config).eval()


class Gate:
    """Lets a model take one step for each permit."""

    def __init__(self, model: Any) -> None:
        self.permits, self.steps = Semaphore(0), 0
        model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        assert self.permits.acquire(timeout=60)
        self.steps += 1


def test_the_tokens_are_those_of_generate(model: Any) -> None:
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    assert [*streamed(model, PROMPT, tokens=12, temperature=0, seed=0)] == expected[0, 3:].tolist()
    drawn = [[*streamed(model, PROMPT, tokens=12, temperature=2.0, seed=seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_token_arrives_before_the_next_is_computed(model: Any) -> None:
    gate = Gate(model)
    tokens = streamed(model, PROMPT, tokens=3, temperature=0, seed=0)
    for number in range(1, 4):
        gate.permits.release()
        next(tokens)
        assert gate.steps == number
    assert [*tokens] == []


def test_closing_the_iterator_ends_the_computation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, gate = active_count(), Gate(model)

    class Stream(token_stream._Stream):
        """Lets the model go on only when its reader has stopped."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "stopped" and value:
                gate.permits.release(50)

    monkeypatch.setattr(token_stream, "_Stream", Stream)
    tokens = streamed(model, PROMPT, tokens=50, temperature=0, seed=0)
    gate.permits.release()
    next(tokens)
    tokens.close()
    assert gate.steps == 2
    assert active_count() == threads


def test_an_error_of_the_model_reaches_the_reader(model: Any) -> None:
    def fails(*_: Any) -> Tensor:
        raise ValueError("no kernel")

    model.register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="no kernel"):
        next(streamed(model, PROMPT, tokens=2, temperature=0, seed=0))
