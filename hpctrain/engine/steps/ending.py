"""The end that a loop asks for: on all ranks after the same step."""

from collections.abc import Mapping

from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers
from hpctrain.engine.part import Part


class Ending(Part):
    """Ends the run once a rank has asked for it, and keeps why."""

    name = "ending"

    def __init__(self) -> None:
        self._asked = self._reason = ""
        self._totals = Copied()

    def ask(self, reason: str) -> None:
        """End the run after this step."""
        self._asked = reason or "the loop has ended the run"

    def flags(self) -> list[float]:
        """Return whether this rank has asked."""
        return [float(bool(self._asked))]

    def offer(self, totals: Numbers) -> None:
        """Take how many ranks have asked."""
        self._totals.offer(totals)

    @property
    def over(self) -> str:
        """Why the run ends; "" as long as nobody has asked."""
        for (ranks,), _ in self._totals.take(late=True):
            if ranks and not self._reason:
                self._reason = self._asked or "the loop of another rank has ended the run"
        return self._reason

    def state_dict(self) -> str:
        """Return why the run has ended."""
        return self._reason

    def load_state_dict(self, state: str | Mapping[str, str]) -> None:
        """Go on from what `state_dict` returned."""
        self._reason = state if isinstance(state, str) else ""
