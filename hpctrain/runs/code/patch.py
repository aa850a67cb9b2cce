"""The changes in a working tree as they are kept in a run directory: a patch without secrets.

    +password: hunter22               +password: ***
    +login(token="hf_a1B2…")          +login(token="***")
    -eos_token = "</s>"               -eos_token = "</s>"

Every line stays a line. `git apply` takes the patch if nothing is masked in the lines that it looks
for, which are those that were there before the change.
"""

from __future__ import annotations

import re

from hpctrain import secrets

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
