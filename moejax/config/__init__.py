"""Frozen dataclasses: what a run is. Imports neither JAX nor any other part of moejax."""
