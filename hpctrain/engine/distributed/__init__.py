"""The process group: devices, collectives of objects, and work that outlasts a collective."""
