"""Tables in CSV and Parquet files: their columns and rows."""
