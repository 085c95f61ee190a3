"""YAML files for `accelerate launch --config_file`."""
