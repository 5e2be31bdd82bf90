"""Checks of the owner's settings: whether they are valid and can be kept here: ports, idle time, battery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.p2pd.p2pd_process import check_port_free
from hetpeer.peer.checkup import thresholds
from hetpeer.peer.checkup.thresholds import Verdict
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, SettingInForce
from hetpeer.peer.daemon.limits_in_force import told
from hetpeer.peer.limits.config_file import effective
from hetpeer.peer.limits.sensors import idle_told, on_battery
from hetpeer.peer.limits.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Settings of one home. `wrong`: the error in them; the defaults stand in then."""

    settings: Mapping[str, SettingInForce]
    standing: DaemonStatus | None
    """Status of the volunteer that runs from there."""
    wrong: LocalError | None = None

    @classmethod
    def of(cls, home: Path) -> Owner:
        """The settings of the volunteer that runs, or of the next one without options. Never raises."""
        try:
            standing = ask(home, ControlRequest(do="status"))
        except LocalError:  # the check of the daemon says why
            standing = None
        if standing is not None and standing.settings:
            return cls(settings=standing.settings, standing=standing)
        try:
            found = effective(home, {})
        except LocalError as error:
            return cls(settings=told(Settings(), {}), standing=standing, wrong=error)
        return cls(settings=told(found.settings, found.sources), standing=standing)

    def value(self, key: str) -> str:
        """Value of the setting `section.key`."""
        return self.settings[key].value

    @property
    def port(self) -> int:
        """At which a volunteer that is started now would listen; 0: any free one."""
        return 0 if self.standing is not None else int(self.value("network.port"))


def settings(owner: Owner) -> Verdict:
    """Raises `LocalError` HP-CONF-003."""
    if owner.wrong is not None:
        raise owner.wrong
    return thresholds.settings(owner.settings, running=owner.standing is not None)


def port(owner: Owner) -> Verdict:
    """Whether a volunteer can listen where it is to. Raises `LocalError` HP-NET-001."""
    if owner.standing is None:
        for key in thresholds.PORTS:
            check_port_free(owner.value("network.host"), int(owner.value(key)))
    addresses = None if owner.standing is None else owner.standing.addresses
    return thresholds.port(owner.settings, addresses)


def idle(owner: Owner) -> Verdict:
    """Takes some seconds where a program hangs. Raises `LocalError` HP-SYS-007."""
    return thresholds.idle(idle_told(), owner.value("when.mode"))


def battery(owner: Owner) -> Verdict:
    """Never raises."""
    return thresholds.battery(on_battery(), owner.value("when.on_battery"))
