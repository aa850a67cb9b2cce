"""How a Transformer may be divided: tensor parallel, a pipeline, experts, and its sequences."""

from collections.abc import Mapping

from torch import nn

from hpctrain.engine.layers.plan import Plan

# As Megatron-LM divides a layer (Shoeybi et al. 2019; Korthikanti et al. 2022 for the sequence).
_TENSOR = {
    "embed": "embedding_rowwise",
    "positions": "embedding_rowwise",
    "dropout": "sequence_parallel",
    "layers.*.attention_norm": "sequence_parallel",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp_norm": "sequence_parallel",
    "layers.*.mlp": "gather_sequence",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "layers.*.attention_dropout": "sequence_parallel",
    "layers.*.mlp_dropout": "sequence_parallel",
    "norm": "sequence_parallel",
    "head": "colwise_gather_output",
}
_EXPERTS = {
    "mlp": "experts",
    "mlp.bank": "experts",
    "mlp.shared": "gather_sequence",
    "mlp.shared.gate": "colwise",
    "mlp.shared.up": "colwise",
    "mlp.shared.down": "rowwise",
}


def plan_of(
    model: nn.Module, layers: nn.ModuleList, numbers: Mapping[str, int], *, experts: bool
) -> Plan:
    """Return the plan of a Transformer; `numbers` are what tp has to divide."""
    modules = dict(model.named_modules())
    outside = [n for n in ("embed", "positions", "dropout", "norm", "head") if n in modules]
    tensor = {name: style for name, style in _TENSOR.items() if name in outside}
    inner = {p.removeprefix("layers.*."): s for p, s in _TENSOR.items() if p.startswith("layers")}
    for i, layer in enumerate(layers if experts else layers[:1]):
        names = {name for name, _ in layer.named_modules()}
        styles = inner | _EXPERTS if "mlp.bank" in names else inner
        place = f"layers.{i}." if experts else "layers.*."
        tensor |= {place + name: style for name, style in styles.items() if name in names}
    return Plan(
        tensor=tensor,
        numbers=numbers,
        first=tuple(n for n in outside if n not in ("norm", "head")),
        blocks="layers",
        last=("norm", "head"),
        experts="layers.*.mlp.bank" if experts else "",
        context=True,
    )
