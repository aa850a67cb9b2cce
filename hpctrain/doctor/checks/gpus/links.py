"""The links of a GPU: PCIe, which is judged by its bandwidth, and NVLink."""

from __future__ import annotations

from hpctrain.doctor.finding import Finding, good

# GB/s of one lane in one direction, by generation, with the loss of the encoding.
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_WARN_PART, _FAIL_PART = 0.9, 0.4


def pcie_bandwidth(generation: int, width: int) -> float:
    """Return GB/s in one direction: Gen4 x8 has as much as Gen3 x16."""
    return _LANE.get(generation, _LANE[max(_LANE)]) * width


def pcie(gpu: str, now: tuple[int, int], best: tuple[int, int]) -> Finding:
    """Judge a PCIe link by generation and width, as it is now and as GPU and slot can have it.

    A GPU at rest lowers its generation to save power, and raises it under load. So the generation
    counts that the GPU and its slot can have, and the width that the link has now.
    """
    check = f"{gpu}: PCIe"
    has, could = pcie_bandwidth(best[0], now[1]), pcie_bandwidth(*best)
    found = f"Gen{now[0]} x{now[1]}, up to Gen{best[0]} x{now[1]} = {has:.0f} GB/s"
    if has >= _WARN_PART * could:
        return good(check, found)
    return Finding(
        check,
        "fail" if has < _FAIL_PART * could else "warn",
        found,
        f"Gen{best[0]} x{best[1]} = {could:.0f} GB/s",
        "Ask the administrators to reseat the GPU or its riser: the link has lost lanes.",
    )


def nvlink(gpu: str, active: int, total: int) -> Finding:
    """Judge the NVLinks of a GPU: how many are up of those that its chip has.

    Boards use a part of them by design, such as 12 of 18, so a lost one shows only against the
    other GPUs of the job (`hpctrain.doctor.comparison`).
    """
    check = f"{gpu}: NVLink"
    if active or not total:
        return good(check, f"{active} of {total} links are up" if total else "this GPU has none")
    return Finding(
        check,
        "warn",
        f"none of {total} links is up",
        f"{total}, unless the board has no bridge",
        "If GPUs of this cluster are usually bridged, ask the administrators to look at the "
        "fabric manager (`systemctl status nvidia-fabricmanager`).",
    )
