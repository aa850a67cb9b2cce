"""A plan: how a model may be divided over ranks, by the names of its modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """What a model says about its modules; an empty part means that it cannot be divided so.

    A name may have `*` for one part: `layers.*.mlp.up` names that module in every layer.

    Attributes:
        tensor: The name of a module and its style under tensor parallel, as in Hugging Face's
            transformers: "colwise" divides the outputs of a linear layer, "rowwise" its inputs,
            "embedding_rowwise" the rows of a table, "colwise_gather_output" the head by the
            vocabulary. "sequence_parallel" works on a part of the sequence (name dropouts too, so
            that their masks are those of one process), and the first input of a "gather_sequence"
            module is put together from these parts. The parameters that an "experts" module itself
            holds are whole on every rank, and see a part of the sequence.
        numbers: What tp has to divide: the name of a number, such as "kv_heads", and its value.
        first: The modules that the first stage of a pipeline has.
        blocks: The list of modules that the stages of a pipeline divide among themselves.
        last: The modules that the last stage of a pipeline has, in their order.
        experts: The modules whose parameters have one row for each expert along their first
            dimension, and whose inputs are tokens sorted by expert and the number of tokens of each
            expert (`hpctrain.models.experts.Bank`).
        context: Whether the model has an attribute `context` for context parallel.
    """

    tensor: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    blocks: str = ""
    last: tuple[str, ...] = ()
    experts: str = ""
    context: bool = False
