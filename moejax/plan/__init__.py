"""What a program will be on GPUs that are not there: compiled for them, and read."""
