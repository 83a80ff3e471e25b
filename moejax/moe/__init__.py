"""Routing, dispatch and experts."""
