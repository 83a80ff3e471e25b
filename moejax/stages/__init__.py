"""What a run does from start to end."""
