"""Sources that many tests convert."""

from converted import bert, linear_llama, llama  # noqa: F401  (fixtures, which pytest finds here by name)
