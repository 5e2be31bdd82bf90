"""What FLOPs take on a device: a time from its speed and its efficiency on such blocks, and how that is found. No torch here."""


def seconds(flops: float, flops_per_second: float, efficiency: float) -> float:
    """How long so many FLOPs take on a device whose matrix product reaches `flops_per_second` (device.measure_flops).

    `efficiency` is λ of FusionLLM (arXiv 2410.12707, section 3.5): the share of that speed which real operators get.
    """
    return flops / (flops_per_second * efficiency)


def efficiency(flops: float, seconds: float, flops_per_second: float) -> float:
    """λ of a device on blocks of which `flops` were seen to take so many `seconds`."""
    return flops / (seconds * flops_per_second)
