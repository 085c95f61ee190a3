"""What conversion and training both need. Nothing of it travels with a checkpoint."""
