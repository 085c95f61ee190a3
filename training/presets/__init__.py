"""Presets: recipes of several stages, and how they are run."""
