"""What is shown of a data set: tables and plots."""
