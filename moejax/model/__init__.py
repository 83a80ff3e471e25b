"""The model: switches, not a class per family."""
