"""The author's model and loss as one function of a batch: his names, his modes, whatever way his loss is
returned.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hetpeer.bootstrap.authoring.loss_module import objective
from hetpeer.dht.base.errors import ExitCode, LocalError

BATCH = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor([0, 1]), "unused": torch.zeros(2)}


class Net(nn.Module):
    """Returns what `shape` makes of its loss."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.lin = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.shape(cross_entropy(self.norm(self.lin(x)), y))


class Outputs(OrderedDict):
    """As transformers does it: a mapping with attributes."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


@pytest.mark.parametrize(
    "shape",
    [
        lambda loss: loss,
        lambda loss: {"logits": torch.zeros(2, 2), "loss": loss},
        lambda loss: Outputs(logits=torch.zeros(2, 2), loss=loss),
        lambda loss: SimpleNamespace(loss=loss, logits=torch.zeros(2, 2)),
        lambda loss: (loss, torch.zeros(2, 2)),
        lambda loss: [loss],
    ],
)
def test_the_loss_is_found_however_it_is_returned(shape: Callable[[Tensor], Any]) -> None:
    expected = Net(lambda loss: loss)(BATCH["x"], BATCH["y"])
    found = objective(Net(shape), None, list(BATCH))(**BATCH)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "shape", [lambda _: None, lambda _: {}, lambda _: (), lambda _: {"loss": None}, lambda loss: loss.item()]
)
def test_a_model_without_a_loss_is_told(shape: Callable[[Tensor], Any]) -> None:
    with pytest.raises(LocalError, match="no loss") as caught:
        objective(Net(shape), None, list(BATCH))(**BATCH)
    assert (caught.value.code, caught.value.exit_code) == ("HP-MODEL-008", ExitCode.CONFIG)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 2.0, *, unused: Tensor | None = None) -> dict[str, Tensor]:
        assert unused is not None
        return {"logits": self.lin(x) * scale}


def test_a_loss_outside_gets_the_outputs_and_the_whole_batch() -> None:
    seen = {}

    def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        seen.update(batch)
        return cross_entropy(outputs["logits"], batch["y"])

    model = Scorer()
    expected = cross_entropy(model(BATCH["x"], unused=BATCH["unused"])["logits"], BATCH["y"])
    assert torch.equal(objective(model, loss, list(BATCH))(**BATCH), expected)
    assert seen.keys() == BATCH.keys()


def test_names_modes_and_state_dict_are_the_authors() -> None:
    model = Net(lambda loss: loss)
    names = [*dict(model.named_parameters())], [*dict(model.named_buffers())], [*model.state_dict()]
    made = objective(model, None, list(BATCH))
    assert isinstance(made, Net)
    assert ([*dict(made.named_parameters())], [*dict(made.named_buffers())], [*made.state_dict()]) == names
    made.eval()
    assert not any(module.training for module in made.modules())
    made.train()
    assert all(module.training for module in made.modules())
    Net(lambda loss: loss).load_state_dict(made.state_dict(), strict=True)


def test_torch_export_calls_the_inputs_by_the_arrays_names() -> None:
    made = objective(
        Scorer(), lambda outputs, batch: cross_entropy(outputs["logits"], batch["y"]), list(BATCH)
    )
    exported = torch.export.export(made, (), dict(BATCH), strict=False)
    assert [*exported.graph_signature.user_inputs] == list(BATCH)
    assert [*exported.state_dict] == ["lin.weight", "lin.bias"]


@pytest.mark.parametrize(("names", "what"), [(("x",), "needs 'y'"), (("a", "b"), "needs 'x'")])
def test_arrays_that_forward_does_not_fit(names: tuple[str, ...], what: str) -> None:
    with pytest.raises(LocalError, match=what) as caught:
        objective(Net(lambda loss: loss), None, names)
    assert (caught.value.code, caught.value.why) == ("HP-MODEL-004", f"a sample has {', '.join(names)}")


def test_a_forward_that_names_nothing() -> None:
    class Anything(nn.Module):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
            return torch.zeros(())

    with pytest.raises(LocalError, match="names none"):
        objective(Anything(), None, list(BATCH))
