"""What waits for the backward pass, and where."""
