"""The registry of update rules: a new rule is one module and one line here (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from hetpeer.averaging.optim.adam import AdamW, NAdam
from hetpeer.averaging.optim.sgd import SGD
from hetpeer.averaging.optim.update_rule import (
    CommonSettings,
    RuleApplication,
    UpdateRule,
    checked,
    wrong_setting,
)

UPDATE_RULES: dict[str, type[UpdateRule]] = {
    "AdamW": AdamW,
    "NAdam": NAdam,
    "SGD": SGD,
}
"""Name in the manifest → rule."""


def rule_kind(name: Any) -> type[UpdateRule]:
    """The rule called `name`. Raises ValueError that names the known ones."""
    if not isinstance(name, str) or name not in UPDATE_RULES:
        raise ValueError(f"unknown optimizer {name!r}; known: {', '.join(UPDATE_RULES)}")
    return UPDATE_RULES[name]


def _of_manifest(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return rule_kind(values.get("name")).model_validate(values)


AnyRule = Annotated[SerializeAsAny[UpdateRule], BeforeValidator(_of_manifest)]
"""Manifest field with the settings of any registered rule, by their `name`."""


def rule_settings(name: str, texts: Iterable[str]) -> dict[str, str | list[str]]:
    """Settings of the rule `name` from texts `KEY=VALUE`; a value with commas is a list.

    Raises `LocalError` HP-RUN-001 for a setting that the rule does not have.
    """
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        known = UPDATE_RULES[name].model_fields.keys() - {"name"} if name in UPDATE_RULES else {key}
        if not equals or key not in known:
            raise wrong_setting(key, f"{name} has the settings {', '.join(sorted(known))}, each KEY=VALUE")
    return {key: value.split(",") if "," in value else value for key, _, value in pairs}


def rule_of(values: Mapping[str, Any]) -> RuleApplication:
    """The rule with these settings (stages/block/parameter_groups.py): its own, its name and the common ones.

    Raises `LocalError` HP-RUN-001 that names a wrong one.
    """
    common = {key: value for key, value in values.items() if key in CommonSettings.model_fields}
    own = {key: value for key, value in values.items() if key not in common}
    try:
        kind = rule_kind(own.get("name"))
    except ValueError as error:
        raise wrong_setting("name", str(error)) from error
    return RuleApplication(checked(kind, own), checked(CommonSettings, common))
