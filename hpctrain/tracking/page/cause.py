"""Why a run has ended, as the first line of its description: MLflow's page shows only the first."""

from __future__ import annotations

_BEGIN, _END = "<!-- hpctrain: cause -->", "<!-- hpctrain: end of the cause -->"
_WORDS = {"FAILED": "Failed", "KILLED": "Stopped"}
_LONGEST = 1000  # characters; the tag `hpctrain.reason` has all of it


def with_cause(before: str, status: str, reason: str) -> str:
    """Return the description of a run with its status; what people have written stays.

    Args:
        before: The description that it has; people may have removed it.
        status: RUNNING, FINISHED, FAILED or KILLED.
        reason: Why the run has ended.
    """
    head, begin, rest = before.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    text = head + tail.lstrip("\n") if begin and end else before
    if not text.strip() or status not in _WORDS or not reason:
        return text
    line = " ".join(reason.split())
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
    return f"{_BEGIN}\n**{_WORDS[status]}**: {line}\n{_END}\n\n{text}"
