"""What of a run outlives its process."""
