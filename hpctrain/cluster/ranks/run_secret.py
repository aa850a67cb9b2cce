"""The secret of a run, with which its ranks know each other.

    runs/digits-3fa92c1b/secret     64 hexadecimal digits, readable by this user only

Rank 0 of the first attempt with several ranks makes it. Everybody in the network can connect to the
ports of a job, and its number, from which the port follows, is public. Whoever reads this file is a
rank; nobody else is (see `hpctrain.engine.distributed.members`).
"""

import hmac
import logging
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import DistributedError
from hpctrain.base.files import disk

log = logging.getLogger(__name__)

FILE = "secret"
_DIGITS = re.compile(r"[0-9a-f]{64}\n")
_LONGEST_NAP_S = 1.0


def sign(secret: bytes, purpose: str, *parts: str | int | bytes) -> bytes:
    """Return the HMAC-SHA256 (32 bytes) of the parts, which depends on where a part ends.

    The purpose names what is signed, so that no signature is of use for anything else.
    """
    contents = [
        part if isinstance(part, bytes) else str(part).encode() for part in (purpose, *parts)
    ]
    message = b"".join(len(content).to_bytes(8) + content for content in contents)
    return hmac.digest(secret, message, "sha256")


def make(folder: Path) -> bytes:
    """Return the secret of a run, on rank 0, which holds the lock of the run; make a missing one.

    A secret that others could read is replaced.
    """
    file = folder / FILE
    try:
        if (found := _read(file)) is not None and _is_private(file):
            return found
        # Not with the umask: with HPCTRAIN_UMASK=027 others may read the other files.
        disk.write_atomically(file, secrets.token_hex(32) + "\n", mode=0o600)
        if not _is_private(file):
            log.warning(
                "%s: this file system keeps no permissions; whoever can read the file can take "
                "the place of a rank: use another output_dir",
                file,
            )
        made = _read(file)
    except OSError as error:
        raise DistributedError(f"{file}: cannot be written ({error.strerror})") from error
    assert made is not None
    return made


def wait_for(folder: Path, timeout_s: float) -> bytes:
    """Return the secret of a run, on the ranks other than 0; wait for it so many seconds."""
    file, end, nap = folder / FILE, time.monotonic() + timeout_s, 0.01
    while (found := _read(file)) is None:
        if time.monotonic() > end:
            raise DistributedError(
                f"{file}: rank 0 has not written the secret of the run within {timeout_s:g} s, or "
                "this node does not see it: output_dir must be on a file system of all nodes"
            )
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
        # A network file system may remember that there was no such file until the folder is opened.
        # Rank 0 makes the folder, too.
        with suppress(FileNotFoundError):
            os.listdir(folder)
    return found


def _read(file: Path) -> bytes | None:
    """Return the 32 bytes of the secret; None if there is none that this user can read."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, PermissionError):  # another user of the group may have made it
        return None
    return bytes.fromhex(text) if _DIGITS.fullmatch(text) else None


def _is_private(file: Path) -> bool:
    found = file.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077
