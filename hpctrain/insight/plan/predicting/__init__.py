"""The memory and the time of one layout."""
