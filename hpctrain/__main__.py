"""`python -m hpctrain`: thin, so that what is pickled or profiled lives in importable modules."""

from hpctrain.cli import main

if __name__ == "__main__":
    main()
