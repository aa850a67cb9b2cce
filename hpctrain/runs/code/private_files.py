"""What stays private of a working tree: files that hold secrets by custom, and secrets in patches.

Such files are in no copy of the code and in no patch. A patch of the others, as it is kept in a run
directory, has `***` for every secret:

    +password: hunter22               +password: ***
    +login(token="hf_a1B2…")          +login(token="***")
    -eos_token = "</s>"               -eos_token = "</s>"

Every line stays a line. `git apply` takes the patch if nothing is masked in the lines that it looks
for, which are those that were there before the change.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from hpctrain import secrets

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


# Files in which a value needs no quotes.
_SETTINGS = re.compile(
    r".*\.(?:ya?ml|ini|cfg|conf|toml|json|env|properties|sh|bash|zsh|sbatch|txt)\"?$"
)
_QUOTED = re.compile(r"([A-Za-z_][\w.\-]*)([\"']?\s*[:=]\s*[rfbu]?)([\"'])([^\"'\s]+)\3")
_PLAIN = re.compile(
    r"([A-Za-z_][\w.\-]*)([\"']?\s*[:=]\s*)()([^\"'\s#,;(){}\[\]]+)(?=\s*(?:[#;].*)?$)"
)


def without_secrets(patch: str) -> str:
    """Return the output of `git diff` with `***` for every secret in it."""
    lines, found = secrets.mask(patch).split("\n"), _QUOTED
    for i, line in enumerate(lines):
        if line.startswith("diff --git "):
            found = _PLAIN if _SETTINGS.match(line) else _QUOTED
        elif line[:1] in "+- ":
            lines[i] = _QUOTED.sub(_masked, line)
            if found is _PLAIN:
                lines[i] = _PLAIN.sub(_masked, lines[i])
    return "\n".join(lines)


def _masked(found: re.Match[str]) -> str:
    name, sign, quote, value = found.groups()
    if not secrets.is_given_away(name.rpartition(".")[2], value):
        return found[0]
    return f"{name}{sign}{quote}{secrets.MASK}{quote}"
