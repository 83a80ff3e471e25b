"""Peak speeds of known GPUs, for MFU."""

PEAKS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "GB200": 2500.0, "GB300": 2500.0, "B200": 2250.0}
"""Dense bfloat16 peak in 1e12 FLOP/s, by a part of the device's name; longer names first where one holds the other. From NVIDIA's data sheets."""


def peak_tflops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of a device in 1e12 FLOP/s, or None if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)
