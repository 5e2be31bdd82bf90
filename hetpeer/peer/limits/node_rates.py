"""Settings that may change while a daemon runs, and the rate limits of its node that follow from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.streams.byte_transport import Throttle
from hetpeer.peer.control.control_messages import SettingInForce
from hetpeer.peer.limits.amounts import rate
from hetpeer.peer.limits.setting_layers import DEFAULT, MergedSettings, changed, worded
from hetpeer.peer.limits.settings import Settings

BY_COMMAND = "hetpeer config set"
"""The source of what was changed while it runs."""
RATES = ("limits.up", "limits.down")

_log = logging.getLogger(__name__)


class NodeRates:
    """Settings in force with their sources; they limit the node that is given later (`use`)."""

    def __init__(self, settings: Settings, sources: Mapping[str, str] = MappingProxyType({})) -> None:
        self.settings = settings
        self.sources = dict(sources)
        """Key of each setting that is not a default → its source."""
        self._throttle = Throttle()

    def use(self, throttle: Throttle) -> None:
        """Limit and count the traffic of this node from now on."""
        self._throttle = throttle
        self._set_rates()

    def change(self, key: str, value: str) -> None:
        """Change a setting. Raises `LocalError` HP-CONF-003."""
        self.settings = changed(self.settings, key, value, "the owner")
        self.sources[key] = BY_COMMAND
        _log.info("%s is now %r", key, value)
        self._set_rates()

    @property
    def told(self) -> dict[str, SettingInForce]:
        """The settings in force, and where each is from, in words."""
        return told(self.settings, self.sources)

    def _set_rates(self) -> None:
        self._throttle.up.limit(rate(self.settings.limits.up))
        self._throttle.down.limit(rate(self.settings.limits.down))


class ServerRates(NodeRates):
    """Settings of a reliable peer or rendezvous: the rates of its line, and no others."""

    @classmethod
    def of(cls, found: MergedSettings) -> ServerRates:
        """The limits in `found`, until its owner changes them."""
        return cls(found.settings, found.sources)

    def change(self, key: str, value: str) -> None:
        """Change a rate. Raises `LocalError` HP-CONF-003, HP-CTL-005 for another setting."""
        if key not in RATES:
            raise LocalError(
                "HP-CTL-005",
                f"a reliable peer or rendezvous has no {key}",
                why="only volunteers compute",
                fix=f"set {' or '.join(RATES)}; for a volunteer, name its home with --home",
                exit_code=ExitCode.USAGE,
            )
        super().change(key, value)

    @property
    def told(self) -> dict[str, SettingInForce]:
        """The rates in force, and where each is from, in words."""
        return {key: one for key, one in super().told.items() if key in RATES}


def told(settings: Settings, sources: Mapping[str, str]) -> dict[str, SettingInForce]:
    """`section.key` → value and source, in words."""
    return {
        key: SettingInForce(value=worded(value)[:512], source=sources.get(key, DEFAULT)[:512])
        for key, value in settings.flat().items()
    }
