"""Evaluation: figures on any number of processes, and comparison with the original."""
