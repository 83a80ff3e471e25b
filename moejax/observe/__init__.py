"""What a run tells about itself: numbers with units, folders, traces and the compiler's warnings."""
