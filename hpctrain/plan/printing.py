"""The answer as tables for a reader."""

from collections.abc import Callable, Mapping, Sequence

from hpctrain.config.advice import HOST_GB_PER_GPU
from hpctrain.console import Console, Table
from hpctrain.hardware import Hardware
from hpctrain.plan.budget import number
from hpctrain.plan.inspecting.model_facts import Layer, ModelFacts
from hpctrain.plan.predicting.estimate import Estimate, uncompared_line
from hpctrain.plan.ranking import Kind
from hpctrain.plan.summary import big, by_ranks, costs, trained
from hpctrain.units import MIB, readable

_MOST = 10  # rows of the table of layouts for each number of ranks


def print_model(console: Console, facts: ModelFacts) -> None:
    """Print the sizes of the model."""
    others = [f"{facts.trainable:,} trained", f"{facts.embedding:,} in embeddings"]
    if facts.active != facts.parameters:
        others.append(f"{facts.active:,} used by a token")
    console.print(f"model: {facts.parameters:,} parameters ({', '.join(others)})")
    if facts.flops is None:
        console.print("FLOPs: unknown, the model can be called only with values")
        return
    flops = facts.flops
    text = f"FLOPs of a sample: {_si(flops.forward)} forward, {_si(flops.training)} in training"
    if flops.tokens:
        text += f"; {_si(flops.training / flops.tokens)} for each of its {flops.tokens:,} tokens"
    console.print(f"{text} ({flops.convention})")


def print_layers(console: Console, layers: list[Layer]) -> None:
    """Print the table of layers."""
    table = Table("layer", "class", "shape", "parameters", "FLOPs", "activations")
    for layer in layers:
        table.add_row(
            layer.name,
            layer.kind,
            "x".join(map(str, layer.shape)),
            f"{layer.parameters:,}",
            "?" if layer.flops is None else _si(layer.flops),
            "?" if layer.activations is None else f"{layer.activations / MIB:.3f} MiB",
        )
    console.print(table)


def print_memory(console: Console, estimate: Estimate) -> None:
    """Print the memory of a layout by part."""
    layout, batch = estimate.layout, estimate.layout.batch
    console.print(
        f"\n{layout.kind} on {layout.ranks} rank{'s' * (layout.ranks > 1)}: global batch "
        f"{batch.global_size} = dp {batch.shares} x accumulate {batch.accumulate} x {batch.micro}"
    )
    table = Table("memory of the rank that needs most", "")
    host = estimate.memory.host
    for name, value in vars(estimate.memory).items():
        if name != "host" or host:
            away = host and name in ("parameters", "gradients", "optimizer")
            text = "unknown" if value is None else readable(value)
            table.add_row(f"{name} (host)" if away else name, text)
    console.print(table)
    if estimate.memory.activations is None:
        console.print("the activations are unknown, so the total is at least this")
    if host:
        number = layout.config.launch.tasks_per_node
        console.print(
            f"each node keeps {readable(number * host)} of {number} ranks in its host "
            f"memory, and needs {HOST_GB_PER_GPU} GB for each rank beside it (launch.mem_gb)"
        )
    if estimate.staged:
        console.print(
            f"each node copies {readable(estimate.staged)} into its host memory for a checkpoint "
            "that is written while the training goes on (checkpoint.staging_gb)"
        )


def print_layouts(console: Console, estimates: list[Estimate], hardware: Hardware) -> None:
    """Print the best layouts of each number of ranks."""
    price = hardware.price_per_hour
    amounts = costs(hardware.price_per_hour, hardware.spot, lambda each: f"{each.amount:g}")
    told = f"; a GPU-hour: {', '.join(amounts)}, {price.date or 'no date'}" if price else ""
    console.print(f"\nestimates on {hardware.title}{told}")
    shown = [one for alike in by_ranks(estimates) for one in alike[:_MOST]]
    _print_estimates(console, shown, [name for name in _CELLS if name != "nodes"], keys=2)
    _print_mark(console, shown)
    if more := len(estimates) - len(shown):
        console.print(f"{more} slower layout{'s' * (more > 1)}: --json lists them")


def print_excluded(console: Console, excluded: Mapping[str, str]) -> None:
    """Print what is not possible, each layout once, on the most ranks; one line for a reason."""
    last = {name.partition(" ")[0]: name for name in excluded}
    names: dict[str, list[str]] = {}
    for name in last.values():
        names.setdefault(excluded[name], []).append(name)
    for reason, alike in names.items():
        layouts = [name.partition(" ")[0] for name in alike[:-1]]
        console.print(f"excluded: {', '.join([*layouts, alike[-1]])}: {reason}")


def print_scaling(console: Console, rows: list[tuple[Estimate, float]]) -> None:
    """Print what more nodes give, if there are several numbers of them."""
    if not rows:
        return
    console.print("\nscaling with the same global batch, the fastest layout of each")
    efficiencies = {"efficiency": [f"{part:.1%}" for _, part in rows]}
    names = ("nodes", "ranks", "layout", "step", "hours", "cost")
    _print_estimates(console, [one for one, _ in rows], names, after=efficiencies)
    few, (more, most) = rows[0][0], max(rows, key=lambda row: row[1])
    if most > 1.005:
        console.print(
            f"more than 100%: of the layouts that have room on {few.layout.ranks} GPUs the fastest "
            f"is {_how(few)}; on {more.layout.ranks} each holds less, so that {_how(more)} has "
            "room, which is faster on each GPU"
        )


def print_hardware(console: Console, rows: list[Kind]) -> None:
    """Print on how many GPUs of each kind the run is possible, and what it takes there."""
    priced = [one and one.price for _, one in rows]
    units = {price.currency for price in priced if price}
    unit = f", in {min(units)}" if len(units) == 1 else ""
    console.print(f"\nthe smallest number of GPUs that is enough, of each kind{unit}")
    before = {
        "hardware": [hardware.name for hardware, _ in rows],
        "GPUs": [str(one.layout.ranks) if one else "-" for _, one in rows],
        "layout": [_name(one) if one else "not possible" for _, one in rows],
    }
    dates = [f"{'' if unit else price.currency} {price.date}" if price else "" for price in priced]
    prices = {"prices of": [date.strip() for date in dates]}
    names = ("trained", "hours", "GPU-hours", "kWh", "cost", "spot")
    _print_estimates(console, [one for _, one in rows], names, before=before, after=prices)
    _print_mark(console, [one for _, one in rows if one])


def _print_estimates(
    console: Console,
    rows: Sequence[Estimate | None],
    names: Sequence[str],
    before: Mapping[str, list[str]] = {},
    after: Mapping[str, list[str]] = {},
    keys: int = 1,
) -> None:
    """Print a table; a column of which nothing is known is left out."""
    cells = {name: ["" if one is None else _CELLS[name](one) for one in rows] for name in names}
    columns = {n: c for n, c in {**before, **cells, **after}.items() if {*c} - {"", "unknown"}}
    table = Table(*columns, right=range(1, len(columns)), keys=keys)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


_CELLS: dict[str, Callable[[Estimate], str]] = {
    "layout": lambda one: _name(one),
    "nodes": lambda one: str(one.layout.nodes),
    "ranks": lambda one: str(one.layout.ranks),
    "memory": lambda one: (
        f"{'>' * (one.memory.activations is None)}{readable(one.memory.total)}"
        f"{' tight' * one.fit.tight}{' does not fit' * (one.fits is False)}"
    ),
    "step": lambda one: _step(one.time.step_s) if one.time else "unknown",
    "tok/s/GPU": lambda one: (
        f"{one.tokens_per_s_per_gpu:,.0f}" if one.tokens_per_s_per_gpu else "unknown"
    ),
    "MFU": lambda one: f"{one.time.mfu:.1%}" if one.time else "unknown",
    "trained": lambda one: trained(one) if one.budget.is_time else "unknown",
    "hours": lambda one: number(one.hours),
    "GPU-hours": lambda one: number(one.gpu_hours),
    "kWh": lambda one: number(one.kwh),
    "cost": lambda one: number(one.cost(one.price)),
    "spot": lambda one: number(one.cost(one.spot)),
}


def _name(one: Estimate) -> str:
    """Return the name of a layout, with a mark if it was compared with nothing."""
    return one.layout.name + " *" * bool(one.uncompared)


def _print_mark(console: Console, rows: Sequence[Estimate]) -> None:
    if line := uncompared_line(rows):
        console.print(f"* {line}")


def _step(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _how(estimate: Estimate) -> str:
    layout, train = estimate.layout, estimate.layout.config.train
    pieces = f"{layout.batch.accumulate} micro-batch{'es' * (layout.batch.accumulate > 1)}"
    return f"{layout.kind} ({pieces}, activation checkpointing {train.activation_checkpointing})"


def _si(number: float) -> str:
    return f"{big(number, (' ', ' k', ' M', ' G', ' T', ' P', ' E'))}FLOP"
