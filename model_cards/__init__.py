"""The template of the model cards."""
