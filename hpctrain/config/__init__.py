"""Everything about keys: the schema, composing, checking and freezing a config."""
