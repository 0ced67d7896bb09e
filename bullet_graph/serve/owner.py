"""By what clients know this server."""

OWNER = "bullet_graph"
"""Who owns the model, as ``/v1/models`` tells it."""
