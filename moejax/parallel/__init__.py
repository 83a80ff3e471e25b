"""Mesh, logical axes, islands and processes."""
