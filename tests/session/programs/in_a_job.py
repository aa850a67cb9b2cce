"""A function for `submit_function`: a job whose ranks open a session."""

from plain import learn


def ranks(*overrides: str) -> float:
    return learn(*overrides)
