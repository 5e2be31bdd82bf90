"""The interface of an update rule, and its application to a block's flat float32 vectors.

All holders of a block apply the committed gradient on their own and must end with equal bits (the next vote
compares digests). So an update is a chain of single IEEE-754 operations, each a torch call of its own. Fused
calls (addcmul, addcdiv, lerp, foreach) may contract to a multiply-add or not, depending on the processor. Two
more calls are avoided: division by a scalar (CUDA multiplies by the reciprocal) and the float32 square root
(on some processors torch takes it from MKL, which does not round it correctly).

The daemon has no torch and reads a rule's settings from the manifest, so a rule's module uses tensors and
their methods, and imports torch in functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.averaging.optim.learning_rate import factor
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import first_wrong

if TYPE_CHECKING:
    from torch import Tensor

    Change = Callable[[Tensor, Tensor, Mapping[str, Tensor]], None]
    """Changes the parameters and their state in place: (parameters, gradient, state). All are 1-D float32
    tensors of one length on one device; the gradient must not be changed.
    """

CHUNK = 1 << 16
"""Elements updated at a time: a chunk (2 MiB) stays in a core's cache. The bits do not depend on it."""
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """Numbers of one update."""

    rate: float
    """Learning rate of this step, by the schedule."""
    weight_decay: float
    coefficient: float
    """Factor of the gradient: clipping by the global norm."""
    update: int
    """Number of the update, from 1."""
    workers: int
    """Number of workers of whose gradients this gradient counts as the mean (SDPipe, section 4)."""


class UpdateRule(BaseModel, ABC):
    """Settings of an update rule, with the manifest's names, and the rule itself. It holds no other state.

    A subclass has a `name: Literal[...]`, its settings with their bounds and defaults, `keeps` and `prepare`.
    `describe` is its row in help and docs. It is registered in update_rules.py. See
    docs/extending.md.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    describe: ClassVar[str]
    name: str

    @property
    @abstractmethod
    def keeps(self) -> tuple[str, ...]:
        """Names of the state vectors, each as long as the parameters and zero before the first update."""

    @property
    def keeps_of_mean(self) -> tuple[str, ...]:
        """Names of further vectors, kept where gradients of several workers count as one mean (`workers`)."""
        return ()

    @abstractmethod
    def prepare(self, now: UpdateContext) -> Change:
        """The function that makes this update on one chunk of the vectors.

        Scalars are computed here, once per update: in Python's float64, then rounded by `float32`. Chunks may
        come in any size and order, so an element's new value depends on that element alone.
        """


class CommonSettings(BaseModel):
    """Settings of every rule, with the manifest's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    learning_rate: Annotated[float, Field(gt=0, le=10)]
    weight_decay: Annotated[float, Field(ge=0, le=1)]
    """Applied to every parameter."""
    schedule: Annotated[tuple[tuple[float, float], ...], Field(min_length=1)] = ((1, 1.0),)
    """Knots of the factor of the learning rate (averaging/optim/learning_rate.py)."""

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`."""
        return self.learning_rate * factor(self.schedule, step)


class RuleApplication:
    """A rule with the settings of one parameter group, as the worker applies it."""

    def __init__(self, rule: UpdateRule, settings: CommonSettings) -> None:
        self._rule = rule
        self._settings = settings

    def apply(
        self,
        *,
        parameters: Tensor,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        coefficient: float,
        update: int,
        step: int,
        workers: int = 1,
    ) -> None:
        """Make update number `update` (from 1) at step `step` of the schedule, in place.

        `parameters` and the rule's vectors of `state` are changed; `gradient` is not. All are 1-D float32
        tensors of one length on one device. Deterministic to the bit for equal inputs.
        """
        import torch

        change = self._rule.prepare(
            UpdateContext(
                rate=self._settings.rate(step),
                weight_decay=self._settings.weight_decay,
                coefficient=coefficient,
                update=update,
                workers=workers,
            )
        )
        of_mean = [name for name in self._rule.keeps_of_mean if name in state]
        kept = [(name, state[name]) for name in (*self._rule.keeps, *of_mean)]
        with torch.no_grad():
            # A GPU has no use for chunks: each is a dozen kernels to start.
            size = CHUNK if parameters.device.type == "cpu" else max(len(parameters), 1)
            for begin in range(0, len(parameters), size):
                part = slice(begin, begin + size)
                change(parameters[part], gradient[part], {name: vector[part] for name, vector in kept})


def checked(kind: type[Model], values: Mapping[str, Any]) -> Model:
    """Settings that came with a manifest. Raises `LocalError` HP-RUN-001 naming the wrong one."""
    try:
        return kind.model_validate(values, strict=True, extra="forbid")
    except ValidationError as error:
        raise wrong_setting(*first_wrong(error)) from error


def wrong_setting(name: str, why: str) -> LocalError:
    """The error HP-RUN-001 for a setting of the optimizer."""
    return LocalError(
        "HP-RUN-001",
        f"bad value in the run's settings: optimizer.{name}",
        why=why,
        fix="have the run's author correct it, and make the run again",
        exit_code=ExitCode.CONFIG,
    )
