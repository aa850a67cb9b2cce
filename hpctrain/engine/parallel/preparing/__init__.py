"""What is done to the modules of a model before they are spread: blocks, formats, values."""
