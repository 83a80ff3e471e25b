"""What is kept, where, and for how long."""
