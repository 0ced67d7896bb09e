"""A worker for NVIDIA Dynamo: ``python -m bullet_graph.dynamo`` (page: README.md beside this file)."""
