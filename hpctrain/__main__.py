"""`python -m hpctrain`. All code is in importable modules, so that pickle and profilers find it."""

from hpctrain.cli import main

if __name__ == "__main__":
    main()
