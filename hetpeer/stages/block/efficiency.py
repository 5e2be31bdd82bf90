"""Time of FLOPs on a device, by its speed and its efficiency on such blocks. No torch here."""


def seconds(flops: float, flops_per_second: float, efficiency: float) -> float:
    """Seconds for `flops` on a device whose matrix product reaches `flops_per_second` (device.measure_flops).

    `efficiency` is λ of FusionLLM (arXiv 2410.12707, section 3.5): the fraction of that speed that real
    operators get.
    """
    return flops / (flops_per_second * efficiency)


def efficiency(flops: float, seconds: float, flops_per_second: float) -> float:
    """λ of a device on blocks whose `flops` took `seconds`."""
    return flops / (seconds * flops_per_second)
