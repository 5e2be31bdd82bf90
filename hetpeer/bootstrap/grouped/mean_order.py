"""Order of a cluster's steps and of the means that it installs: which may begin, and which come first.

Pure. A cluster whose averagings are delayed and whose steps overlap never stops for an averaging. A mean is a
version like an update, and steps under way have their numbers already. So the mean is given its number before
a step begins behind it, and is installed between the steps before and after it (docs/grouped.md, "No pause
at all").
"""

from __future__ import annotations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.state.effects import CoordinatorConfig


class MeanOrder:
    """Decisions for the clusters of one term, by the `averagings` that are under way."""

    def __init__(self, config: CoordinatorConfig, averagings: Averagings) -> None:
        self._averagings = averagings
        self._interval = config.averaging_interval
        self._ahead = config.staleness if config.averaging_delayed else 0

    def overlaps(self, cluster: Cluster) -> bool:
        """Whether steps of `cluster` overlap across its averagings."""
        return self._ahead > 0 and cluster.members.speak(m.MEANS_BESIDE, cluster.members.roster())

    def after_mean(self, cluster: Cluster, ahead: int) -> bool | None:
        """Whether the mean under way comes before the next step of `cluster`, beside `ahead` steps; None: no
        step may begin now.
        """
        averagings, number = self._averagings, cluster.number
        begun = cluster.history.version + ahead
        if averagings.stands_still(number):
            return None
        if not self.overlaps(cluster):
            return None if number in averagings.promised or averagings.due(number, begun) else False
        if not averagings.busy(number):
            most = 2 * self._interval + self._ahead  # in line it trains one more interval at most
            return None if averagings.trained(number, begun) >= most else False
        ready = number in averagings.promised
        if cluster.mean is not None:
            return None if not ahead or (ready and cluster.takes_mean) else False
        comes = ready or averagings.trained(number, begun) >= self._put_off(cluster)
        return None if comes and not ahead else comes

    def _put_off(self, cluster: Cluster) -> int:
        """Batches from the copy to the mean: as many as the last averaging took, 1 to `interval`.

        A mean that is late holds up the commits behind it, and S steps more hide that.
        """
        commits = cluster.history.commits
        step_s = float(commits[max(commits)].get("seconds", 0.0)) if commits else 0.0
        lasted = int(self._averagings.took_s / step_s) if step_s > 0.0 else 1
        return max(1, min(self._interval, lasted))
