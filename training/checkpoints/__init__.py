"""Checkpoints of a run, and the folder of the finished model."""
