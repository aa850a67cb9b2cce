"""Small values for all ranks, as JSON in tensors.

torch's own object collectives unpickle what they receive, and a pickle can run any code.
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value that the rank `src` of the group has, on all its ranks, as JSON has it."""
    return all_gather(value if dist.get_rank(group) == src else None, group)[src]


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of the group, by rank; tuples become lists, as in JSON."""
    text = json.dumps(value)
    texts = [text] if dist.get_world_size(group) == 1 else _all_texts(text, group)
    return [json.loads(each) for each in texts]


def _all_texts(text: str, group: dist.ProcessGroup | None) -> list[bytes]:
    content = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    content = content.to(device_of(group))
    sizes = [content.new_empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)], device=content.device), group=group)
    longest = int(torch.cat(sizes).max())
    padded = torch.nn.functional.pad(content, (0, longest - len(content)))
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [each[: int(n)].cpu().numpy().tobytes() for each, n in zip(found, sizes, strict=True)]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of small tensors for the group: the CPU, unless it has NCCL only."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
