"""In a checkout this package stands in the folder `model_cards` at the top; an installation puts it here."""

from pathlib import Path


__path__ = [str(Path(__file__).resolve().parents[2] / "model_cards")]
