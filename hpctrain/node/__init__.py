"""What a person does on the node of a run: a shell, a debugger, a notebook."""
