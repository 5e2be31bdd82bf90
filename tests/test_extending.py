"""docs/extending.md: its examples run in the real parts, and every registered name has its row in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetpeer.averaging.optim.update_rules import UPDATE_RULES, rule_of, rule_settings
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import LocalError

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLE = re.compile(r"^```python (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = dict(EXAMPLE.findall((DOCS / "extending.md").read_text()))


def example(kind: str) -> dict[str, Any]:
    """The names that the page's example of `kind` defines."""
    names: dict[str, Any] = {"__name__": f"extending_{kind}"}
    exec(compile(EXAMPLES[kind], f"docs/extending.md, {kind}", "exec", dont_inherit=True), names)
    return names


def rows(page: str) -> set[str]:
    """Names in backticks at the beginning of the rows of a page's tables."""
    return set(re.findall(r"^\| `([^`]+)`", (DOCS / page).read_text(), re.MULTILINE))


@pytest.mark.parametrize(("page", "registry"), [("averaging.md", UPDATE_RULES)])
def test_every_registered_name_has_its_row(page, registry):
    assert set(registry) <= rows(page)


def test_update_rule(monkeypatch):
    """The manifest accepts it, and the worker's update is the one computed in numpy."""
    monkeypatch.setitem(UPDATE_RULES, "Lion", example("update_rule")["Lion"])
    own = rule_settings("Lion", ["betas=0.95,0.98"])
    settings = TrainingSettings.model_validate({"optimizer": {"name": "Lion"} | own, "learning_rate": 0.01})
    assert settings.optimizer.keeps == ("exp_avg",)
    assert settings.model_dump()["optimizer"] == {"name": "Lion", "betas": (0.95, 0.98)}
    rule = rule_of(settings.update)
    parameters = torch.randn(70_003, generator=torch.Generator().manual_seed(0))
    state, expected, mean = (
        {"exp_avg": torch.zeros(70_003)},
        parameters.numpy().copy(),
        np.zeros(70_003, "f4"),
    )
    f32 = np.float32
    for update in (1, 2, 3):
        gradient = torch.randn(70_003, generator=torch.Generator().manual_seed(update))
        rule.apply(
            parameters=parameters,
            state=state,
            gradient=gradient,
            coefficient=0.5,
            update=update,
            step=update,
        )
        g = gradient.numpy() * f32(0.5)
        expected = expected * f32(1 - 0.01 * 0.1) + np.sign((g - mean) * f32(1 - 0.95) + mean) * f32(-0.01)
        mean = mean + (g - mean) * f32(1 - 0.98)
    assert parameters.numpy().tobytes() == expected.tobytes()
    assert state["exp_avg"].numpy().tobytes() == mean.tobytes()


def test_an_unknown_update_rule_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown optimizer 'Lion'; known: AdamW, NAdam, SGD"):
        TrainingSettings.model_validate({"optimizer": {"name": "Lion"}})
    with pytest.raises(LocalError, match=r"optimizer\.beta"):
        rule_settings("AdamW", ["beta=1"])
