"""Files that hold secrets by custom: they are in no copy of the code and in no patch."""

from fnmatch import fnmatchcase
from pathlib import Path

NAMES = (
    *(".env", ".env.*", ".netrc", ".pgpass", ".git-credentials", ".pypirc", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx"),
)
_TEMPLATES = (".env.example", ".env.sample", ".env.template", ".env.dist")
_MAY_BE_KEYS = ("*.pem", "*.key")  # certificates, which are public, have these names as well
_LONGEST_KEY = 65536  # bytes


def is_private(path: Path) -> bool:
    """Return whether a file holds secrets, by its name; a key also by its content."""
    name = path.name
    if name not in _TEMPLATES and any(fnmatchcase(name, pattern) for pattern in NAMES):
        return True
    if not any(fnmatchcase(name, pattern) for pattern in _MAY_BE_KEYS):
        return False
    try:
        with path.open("rb") as file:
            return b"PRIVATE KEY" in file.read(_LONGEST_KEY)
    except OSError:
        return False
