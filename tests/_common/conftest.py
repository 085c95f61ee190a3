"""What a card is written for."""

from converted import linear_llama, llama  # noqa: F401  (fixtures, which pytest finds here by name)
