"""Compare what the ranks of a job have seen; the result has the findings of each host."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from hpctrain.insight.doctor.checks.gpu_health import GpuFacts
from hpctrain.insight.doctor.finding import Finding, Result, bad, bounded, good, judged
from hpctrain.insight.doctor.probe import Probe

Places = dict[str, list[Finding]]
# A new version of these does not change numbers; administrators update node by node.
_MAY_DIFFER = ("system", "InfiniBand")
# Parts of the median of all below which a figure, or the link of a node, is slow.
_WARNS, _LINK_WARNS, _FAILS = 0.8, 0.7, 0.5
_COMPARED = ("matmul_tflops", "memory_gb_s", "to_gpu_gb_s")  # of the figures of a rank


def compared(looks: Sequence[Probe], *, mixed: bool = False) -> Places:
    """Return the findings of each host: its own, and what differs from the other hosts.

    Where nodes may differ (`Expectation.mixed`), only GPUs of one kind are compared.
    """
    alike: dict[str, list[Probe]] = {}
    for each in looks:
        kind = each.gpus[0].name if each.gpus else each.host
        alike.setdefault(kind if mixed else "", []).append(each)
    places: Places = {}
    for each in sorted(looks, key=lambda one: one.rank):
        own = places.setdefault(each.host, [])
        own += [finding for finding in each.findings if finding not in own]
    for host, finding in (
        *_versions(looks, mixed),
        *_number_of_gpus(looks),
        *(found for group in alike.values() for found in (*_gpus(group), *_figures(group))),
    ):
        places[host].append(finding)
    for host, finding in links({} if mixed else _pairs(looks)).items():
        places[host].append(finding)
    return places


def _versions(looks: Sequence[Probe], mixed: bool) -> Iterable[tuple[str, Finding]]:
    by_host = {each.host: each.versions for each in looks if each.versions}
    usual = {
        name: Counter(each.get(name, "missing") for each in by_host.values()).most_common(1)[0][0]
        for name in {name: None for each in by_host.values() for name in each}
        if not (mixed and name in _MAY_DIFFER)
    }
    for host, versions in by_host.items():
        others = {n: v for n, v in usual.items() if versions.get(n, "missing") != v}
        for name, value in others.items():
            result: Result = "warn" if name in _MAY_DIFFER else "fail"
            kind = f"same {name}" if name in ("torch", "InfiniBand", "code") else "same versions"
            found = versions.get(name, "missing")
            yield host, bad(kind, result, found, f"same {name}", usual=value)
        if not others:
            shown = f"torch {versions.get('torch', '')}, code {versions.get('code', '')}"
            yield host, good("same versions", shown)


def _number_of_gpus(looks: Sequence[Probe]) -> Iterable[tuple[str, Finding]]:
    """Count the GPUs of each node over its ranks, which may see all of them or one each."""
    by_host: dict[str, list[Probe]] = {}
    for each in looks:
        by_host.setdefault(each.host, []).append(each)
    for host, ranks in by_host.items():
        given = max(each.gpus_given for each in ranks)
        if given and len(ranks) == ranks[0].peers:  # a rank that is missing is named elsewhere
            seen = len({uuid for each in ranks for uuid in each.uuids})
            well = seen >= given
            yield host, judged("number of GPUs", well, f"{seen}", "fail", given=given)


def _gpus(looks: Sequence[Probe]) -> Iterable[tuple[str, Finding]]:
    all_gpus = [gpu for each in looks for gpu in each.gpus]
    if not all_gpus:
        return
    for name in (one.name for one in fields(GpuFacts)):
        values = [told for gpu in all_gpus if (told := getattr(gpu, name)) is not None]
        if not values:
            continue
        usual = Counter(values).most_common(1)[0][0]
        if name == "nvlinks":  # boards differ in their number, but one that is lost was there
            usual = max(values)
        for each in looks:
            for value in {getattr(gpu, name) for gpu in each.gpus} - {usual, None}:
                if name != "memory_bytes" or abs(value - usual) > 0.01 * usual:
                    yield each.host, _differs(name, value, usual)


def _differs(name: str, value: Any, usual: Any) -> Finding:
    # A card without any link may be the one that has no bridge, and drivers are renewed node by
    # node.
    stops = name in ("name", "memory_bytes") or (name == "nvlinks" and value)
    check = f"same GPUs: {name}"
    kind = check if name in ("driver", "nvlinks") else "same GPUs"
    return bad(kind, "fail" if stops else "warn", f"{value}", check, usual=usual)


def _figures(looks: Sequence[Probe]) -> Iterable[tuple[str, Finding]]:
    for name in _COMPARED:
        # Of a CPU, these depend on what else runs there, and are only shown.
        values = [
            (each, each.figures[name]) for each in looks if name in each.figures and each.gpus
        ]
        middle = median(value for _, value in values) if values else 0.0
        bounds = _FAILS * middle, _WARNS * middle
        for each, value in values:
            check = f"rank {each.rank}: {name}"
            yield each.host, bounded(name, value, f"{value:.4g}", bounds, check, middle=middle)


def links(speeds: Mapping[tuple[str, str], float]) -> dict[str, Finding]:
    """Judge the link of each node by the MB/s of its pairs: it is slow if even its fastest pair is.

    Of two nodes it cannot be told which one is slow.
    """
    found: dict[str, Finding] = {}
    for node in sorted({name for pair in speeds for name in pair}):
        own = max(speed for pair, speed in speeds.items() if node in pair)
        others = [speed for pair, speed in speeds.items() if node not in pair]
        shown = f"{own:,.0f} MB/s with its best partner"
        if not others:
            found[node] = good("link to other nodes", shown)
            continue
        middle = median(others)
        bounds = _FAILS * middle, _LINK_WARNS * middle
        found[node] = bounded("link to other nodes", own, shown, bounds, middle=middle)
    return found


def _pairs(looks: Sequence[Probe]) -> dict[tuple[str, str], float]:
    """Return the speed of each pair of hosts: the slower of what both have measured."""
    hosts = list(dict.fromkeys(each.host for each in sorted(looks, key=lambda one: one.rank)))
    speeds: dict[tuple[str, str], float] = {}
    for each in looks:
        for number, host in enumerate(hosts):
            if (value := each.figures.get(f"pair_{number}_mb_s")) is not None:
                pair = (min(each.host, host), max(each.host, host))
                speeds[pair] = min(value, speeds.get(pair, value))
    return speeds


def figures(looks: Sequence[Probe]) -> dict[str, dict[str, float]]:
    """Return the median of each figure over the ranks of a host."""
    values: dict[str, dict[str, list[float]]] = {}
    for each in looks:
        own = values.setdefault(each.host, {})
        for name, value in each.figures.items():
            own.setdefault(name, []).append(value)
    return {
        host: {name: median(found) for name, found in by_name.items()}
        for host, by_name in values.items()
    }
