"""Tables in CSV, Parquet and Arrow files: their columns and rows."""
