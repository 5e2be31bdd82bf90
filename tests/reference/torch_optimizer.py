"""torch's optimizer and learning-rate schedule for the settings of a manifest."""

import fnmatch
from typing import Any

import numpy as np
import torch
from torch import nn


def optimizer_of(
    model: nn.Module, settings: dict[str, Any]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """(optimizer of all parameters in their groups, schedule that is stepped after each update)."""
    groups = []
    for name, parameter in model.named_parameters():
        group = next((g for g in settings["groups"] if fnmatch.fnmatchcase(name, g["pattern"])), settings)
        own = [settings[k] if group[k] is None else group[k] for k in ("learning_rate", "weight_decay")]
        groups.append({"params": [parameter], "lr": own[0], "weight_decay": own[1]})
    rule, (at, height) = dict(settings["optimizer"]), np.array(settings["schedule"], dtype=np.float64).T
    optimizer = getattr(torch.optim, rule.pop("name"))(groups, **rule)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: float(np.interp(done + 1, at, height)))
    return optimizer, rate
