"""The template of the model cards; in an installation this is a package, so that its files are found."""
