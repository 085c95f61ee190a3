"""Reproductions of papers and studies: `python -m benchmarks.papers.NAME`, from the root of the repository."""
