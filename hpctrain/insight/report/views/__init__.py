"""How reports are shown: on the terminal, as one page, as a picture."""
