"""Settings merged from several sources: defaults, a file, the environment, the command line. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import plain_reason
from hetpeer.peer.limits.settings import KEYS, Settings

PREFIX = "HETPEER_"
SHORT = {"HETPEER_DASHBOARD": "dashboard.listen"}
DEFAULT = "default"
"""Source of a setting that nobody has set."""
COMMAND_LINE = "the command line"
"""Source of a setting that is an option of `join`."""


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """Settings of one source: `section.key` → value. Later layers override earlier ones."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MergedSettings:
    """Settings, and the source of each that is not a default."""

    settings: Settings
    sources: Mapping[str, str]


DEFAULTS = MergedSettings(Settings(), {})


def merged(layers: Sequence[SettingsLayer]) -> MergedSettings:
    """Settings in force from all layers. Raises `LocalError` HP-CONF-003 that names key and source."""
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for dotted, value in layer.values.items():
            if dotted not in KEYS:
                raise _unknown(dotted, layer.source)
            section, _, key = dotted.partition(".")
            values.setdefault(section, {})[key] = value
            sources[dotted] = layer.source
    try:
        return MergedSettings(Settings.model_validate(values), sources)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"][:2]))
        if "." not in place:  # of a whole section: nothing but a schedule has hours
            place = "when.hours"
        raise wrong_setting(place, sources.get(place, "the default"), plain_reason(first["msg"])) from error


def of_file(tables: Mapping[str, Any], source: str) -> SettingsLayer:
    """The layer of a TOML file."""
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if isinstance(table, Mapping):
            values |= {f"{name}.{key}": value for key, value in table.items()}
        else:
            values[name] = table  # which is no key of ours
    return SettingsLayer(source, values)


def of_environment(environment: Mapping[str, str]) -> Sequence[SettingsLayer]:
    """A layer for each variable `HETPEER_<SECTION>_<KEY>`, also for a misspelt key (`merged` refuses it).

    Other variables with the prefix are ignored; `HETPEER_DASHBOARD` is short for that section's only key.
    """
    layers = []
    # the short one after the long
    for name, text in sorted(environment.items(), key=lambda item: item[0] in SHORT):
        if not name.startswith(PREFIX):
            continue
        section, _, key = name.removeprefix(PREFIX).lower().partition("_")
        dotted = SHORT.get(name, f"{section}.{key}")
        if dotted in KEYS or (key and (section in Settings.model_fields or _near(dotted))):
            layers.append(SettingsLayer(f"the environment's {name}", {dotted: text}))
    return layers


def worded(value: object) -> str:
    """A setting's value as people write it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def wrong_setting(key: str, source: str, why: str) -> LocalError:
    """HP-CONF-003."""
    return LocalError(
        "HP-CONF-003",
        f"the setting {key} of {source} has no valid value",
        why=why,
        fix="correct it; docs/limits.md says what each setting takes",
        exit_code=ExitCode.CONFIG,
    )


def _unknown(dotted: str, source: str) -> LocalError:
    near = _near(dotted, 0.6)
    return LocalError(
        "HP-CONF-003",
        f"the setting {dotted} of {source} does not exist",
        why=f"the nearest name is {near}" if near else "no name is like it",
        fix="correct the name; hetpeer config show lists the settings",
        exit_code=ExitCode.CONFIG,
    )


def _near(dotted: str, alike: float = 0.8) -> str | None:
    """The key that is meant, if one is."""
    return next(iter(difflib.get_close_matches(dotted, KEYS, 1, alike)), None)


def changed(settings: Settings, key: str, value: Any, source: str) -> Settings:
    """Copy of `settings` with `key` set to `value`. Raises `LocalError` HP-CONF-003."""
    now = SettingsLayer("", {name: old for name, old in settings.flat().items() if name != key})
    return merged([now, SettingsLayer(source, {key: value})]).settings
