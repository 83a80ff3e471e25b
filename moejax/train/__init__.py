"""The train step and its loop."""
