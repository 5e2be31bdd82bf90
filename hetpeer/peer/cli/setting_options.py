"""Options of commands that override settings: made from the settings themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from hetpeer.peer.limits.settings import JoinOption, Settings


def with_settings(settings: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of `settings` (parameter → `section.key`), behind its `home`.

    The command gets them by keyword; None: not given.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]  # without **settings
        behind = 1 + next(place for place, one in enumerate(own) if one.name == "home")
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(setting))
            for name, setting in settings.items()
        ]
        command.__signature__ = inspect.Signature([*own[:behind], *options, *own[behind:]])  # type: ignore[attr-defined]
        return command

    return decorated


def _option(setting: str) -> Any:
    """Typer's annotation of the option for `setting`."""
    section, _, key = setting.partition(".")
    field = type(getattr(Settings(), section)).model_fields[key]
    option = next(one for one in field.metadata if isinstance(one, JoinOption))
    kind = field.annotation if field.annotation in (bool, int) else str
    bounds = {to: getattr(one, to) for one in field.metadata for to in ("ge", "le") if hasattr(one, to)}
    if option.positive:
        bounds = {"ge": 1}
    shown = typer.Option(
        option.name,
        min=bounds.get("ge"),
        max=bounds.get("le"),
        show_default=False,
        help=f"{option.help} [{setting}]",
    )
    return Annotated[kind | None, shown]
