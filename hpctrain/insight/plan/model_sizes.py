"""The shapes of a model's parameters, as far as a formula of memory needs them.

model, blocks, plan of tensor and expert parallel ── shapes of one rank ── elements of a part
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from hpctrain.config.rules.degrees import names_module

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelSizes:
    """The shapes of a model's parameters, each parameter once.

    Where only a number of elements is known, a shape of one dimension stands for it.
    """

    blocks: tuple[tuple[Shape, ...], ...]
    rest: tuple[Shape, ...]  # outside of the blocks, such as embeddings
    # Of each block, those that expert parallel leaves to a rank; `blocks` do not have them.
    experts: tuple[tuple[Shape, ...], ...] = ()
    ep: int = 1  # the ranks that divide the experts

    @classmethod
    def of(
        cls,
        model: Any,
        blocks: Iterable[Any],
        plan: Mapping[str, str] | None = None,
        tp: int = 1,
        *,
        experts: str = "",
        ep: int = 1,
        trained: bool = False,
        without: Collection[Any] = (),
    ) -> ModelSizes:
        """Return the sizes of a model; one on the meta device is enough.

        A parameter that several modules share counts in the first block that has it, those of
        `without` do not.
        """
        seen = {id(p) for p in model.parameters() if trained and not p.requires_grad}
        seen.update(map(id, without))
        divided: dict[int, tuple[int, int]] = {}  # the axis, and the ranks that divide it
        of_experts = set()
        for name, module in model.named_modules():
            holds = ep > 1 and names_module(experts, name)
            for key, parameter in module.named_parameters(recurse=False):
                if holds:
                    of_experts.add(id(parameter))
                    divided[id(parameter)] = 0, ep
                elif tp > 1 and (axis := _divided_axis(name, key, plan or {})) is not None:
                    divided[id(parameter)] = axis, tp

        def shapes(module: Any) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
            parts: tuple[list[Shape], list[Shape]] = [], []
            for p in module.parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    axis, ranks = divided.get(id(p), (None, 1))
                    shape = (-(-n // ranks) if i == axis else n for i, n in enumerate(p.shape))
                    parts[id(p) in of_experts].append(tuple(shape))
            return tuple(parts[0]), tuple(parts[1])

        parts = [shapes(block) for block in blocks]
        held = tuple(part[1] for part in parts) if of_experts else ()
        return cls(tuple(part[0] for part in parts), shapes(model)[0], held, ep)

    @property
    def count(self) -> int:
        """The number of elements of all parameters."""
        return self.part(1)

    @property
    def largest_block(self) -> int:
        """The number of elements of the largest block."""
        blocks = (block + held for block, held in self._kinds)
        return max((sum(map(math.prod, block)) for block in blocks), default=0)

    @property
    def outside(self) -> int:
        """The number of elements outside of the blocks."""
        return sum(map(math.prod, self.rest))

    @property
    def largest_parameter(self) -> int:
        """The number of elements of the largest parameter."""
        return max((elements for _, elements, _ in self._stored(1)), default=0)

    def part(self, ranks: int) -> int:
        """Return the number of elements that each of `ranks` ranks stores.

        FSDP2 divides the first dimension and pads it, so that all ranks store equally much. Experts
        that expert parallel has divided are divided once more over the ranks that have the same.
        """
        return self._counted(ranks)[0]

    def whole(self, ranks: int) -> int:
        """Return the number of elements when what `ranks` ranks store is put together."""
        return self._counted(ranks)[1]

    def pinned(self, ranks: int, size: int) -> int:
        """Return the bytes of `part` in pinned memory, with `size` bytes for an element."""
        # torch rounds each tensor up to a power of two (ATen/core/CachingHostAllocator.h).
        stored = ((number, size * elements) for number, elements, _ in self._stored(ranks))
        return sum(number << (nbytes - 1).bit_length() for number, nbytes in stored if nbytes)

    def _counted(self, ranks: int) -> tuple[int, int]:
        """Return `part` and `whole`, which all micro-batches of a layout ask for."""
        if ranks not in self._found:
            stored = [(number * elements, same) for number, elements, same in self._stored(ranks)]
            whole = sum(elements * same for elements, same in stored)
            self._found[ranks] = sum(elements for elements, _ in stored), whole
        return self._found[ranks]

    def _stored(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield alike parameters: their number, a rank's elements, and how many ranks have it."""
        among_experts = max(1, ranks // self.ep)
        for (block, held), number in (*self._kinds.items(), ((self.rest, ()), 1)):
            for same, shapes in ((ranks, block), (among_experts, held)):
                for shape in shapes:
                    rows, *others = shape
                    # FSDP2 divides the width of experts, if they are too few for all ranks.
                    if len(shape) == 3 and rows % same and shape[1] % same == 0:
                        yield number, math.prod(shape) // same, same
                    else:
                        yield number, -(-rows // same) * math.prod(others), same

    @cached_property
    def _kinds(self) -> Counter[tuple[tuple[Shape, ...], tuple[Shape, ...]]]:
        """The blocks with their experts, and how many of each: those of a model are alike."""
        return Counter(zip_longest(self.blocks, self.experts, fillvalue=()))

    @cached_property
    def _found(self) -> dict[int, tuple[int, int]]:
        return {}


def _divided_axis(module: str, key: str, plan: Mapping[str, str]) -> int | None:
    """Return the axis along which tensor parallel divides a parameter of a module, or None."""
    for pattern, style in plan.items():
        if names_module(pattern, module):
            if style == "rowwise":
                return 1 if key in ("weight", "lora_A") else None
            if key == "lora_A":
                return None
            return 0 if "wise" in style else None
    return None
