"""The papers' results and the project's figures, each by one script."""
