"""How the ranks of a job find each other, and let nobody else in."""
