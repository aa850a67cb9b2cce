"""What a person reads: texts on a terminal, tables, bars."""
