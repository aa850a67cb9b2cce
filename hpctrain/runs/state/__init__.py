"""How a run has ended, what follows from it, and what it is asked to do."""
