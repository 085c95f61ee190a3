"""YAML files for `--config`: one recipe per task."""
