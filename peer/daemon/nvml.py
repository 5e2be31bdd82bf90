"""What NVML says of the NVIDIA GPUs, where the optional package nvidia-ml-py is installed and a driver answers; else nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

_log = logging.getLogger(__name__)


class Gpus:
    """All of the machine. None of its methods raises."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._seen: dict[int, int] = {}
        """Number of a GPU → time stamp of the last sample of its users, in µs."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        except ImportError:
            _log.info("nvidia-ml-py is not installed: no limits by the GPU's temperature or its other users")
        except pynvml.NVMLError as error:
            _log.info(
                "NVML does not answer (%s): no limits by the GPU's temperature or its other users", error
            )

    @property
    def there(self) -> bool:
        """Whether there is any."""
        return bool(self._handles)

    def hottest(self) -> float | None:
        """°C of the hottest."""
        found = []
        for handle in self._handles:
            try:
                found.append(
                    float(self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU))
                )
            except self._nvml.NVMLError as error:
                _log.debug("a GPU does not tell its temperature: %s", error)
        return max(found, default=None)

    def foreign_share(self, ours: Collection[int]) -> float | None:
        """The largest share of one GPU that processes other than `ours` (pids) have used since the last look."""
        shares = [self._foreign(number, ours) for number in range(len(self._handles))]
        return max((share for share in shares if share is not None), default=None)

    def _foreign(self, number: int, ours: Collection[int]) -> float | None:
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(
                self._handles[number], self._seen.get(number, 0)
            )
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:  # nobody has used it
                return 0.0
            _log.debug("a GPU does not tell its users: %s", error)
            return None
        self._seen[number] = max((sample.timeStamp for sample in samples), default=self._seen.get(number, 0))
        latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        return float(sum(sample.smUtil for pid, sample in latest.items() if pid not in ours)) / 100
