"""Data: from files to batches, as a pure function of the seed."""
