"""Only processes that know the secret of the run are ranks: the first thing that a group does.

    rank r ── nonce r ──────────────────────────── all-gather ── all nonces
           ── HMAC(secret, r, number of ranks, all nonces) ── all-gather ── every rank checks all

A process group has no authentication: the port, and the name under which the ranks meet, follow
from the number of the job, which everybody sees. Whoever joined in the place of a rank would get
the gradients and, since torch's object collectives unpickle what they receive, run code here.

The check is made over the connections of the group itself, not over the store, because a stranger
who changes the addresses in the store gets into the group without being seen in the store. From the
nonces follows a key for this group: torch's object collectives then sign each message and check it
before it is unpickled (`signed_objects`). Tensors are not signed.
"""

import hmac
import pickle
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.base.errors import DistributedError
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks.run_secret import sign
from hpctrain.engine.distributed.objects import device_of

_BYTES = 32  # of a nonce and of a signature


def check(secret: bytes) -> bytes:
    """Check that all ranks of the default group know the secret; each rank calls this.

    Returns a key of 32 bytes that only the ranks of this group know. A process that does not know
    the secret is a DistributedError.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A signature of an earlier group is of no use: it is of other nonces.
    nonces = sha256(b"".join(_gather(secrets.token_bytes(_BYTES)))).digest()
    proofs = _gather(sign(secret, "rank", rank, world_size, nonces))
    strangers = [
        other
        for other, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, sign(secret, "rank", other, world_size, nonces))
    ]
    if strangers:
        shown = few(strangers, 8)
        raise DistributedError(
            f"in the place of rank {shown} (of {world_size}), seen from rank {rank}, is a process "
            "that does not know the secret of this run: a process of somebody else has joined, or "
            "the nodes see different run directories. Nothing that it has sent was used"
        )
    return sign(secret, "objects", nonces)


def _gather(content: bytes) -> list[bytes]:
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device_of())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [each.cpu().numpy().tobytes() for each in found]


@contextmanager
def signed_objects(key: bytes) -> Iterator[None]:
    """Sign every message of torch's object collectives, and check it before it is unpickled.

    torch itself calls them, as in a save of torch.distributed.checkpoint. A message without the
    right signature raises a DistributedError, and nothing of it is unpickled. The key is that which
    `check` has returned.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(sign(key, "object", content) + content)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            signature, content = self._file.read(_BYTES), self._file.read()
            if not hmac.compare_digest(signature, sign(key, "object", content)):
                raise DistributedError(
                    "an object that came from another rank is not signed with the key of this "
                    "process group: somebody else has sent it, so it was not unpickled"
                )
            return pickle.loads(content)

    # torch looks these names up for each message.
    before = distributed_c10d._pickler, distributed_c10d._unpickler
    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._pickler, distributed_c10d._unpickler = before
