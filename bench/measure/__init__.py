"""What is measured beside the taps, one file each."""
