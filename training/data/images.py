"""Images with classes (`--task image_classification`), which are read and processed when they are needed.

The data is a folder for `--dataset_name` (the imagefolder of `datasets`: train/<class>/<file>), a .parquet or a data
set with a column of images, or a .jsonl, .csv or .tsv with paths relative to its folder. The model's image processor
prepares the images; there is no augmentation.
"""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.packing import Example, Examples, Part, Tokens, finished
from hf_linear_attention.training.data.rows import class_labels, folder_of, missing_labels, refuse_bad, require_column


class Images:
    """One example per image: its pixel values [C, H, W] and, if there are labels, its class."""

    def __init__(self, part: Part, labels: list[int] | None) -> None:
        self.images, self.root = _undecoded(part), folder_of(part)
        self.processor, self.labels = part.processor, labels

    @property
    def lengths(self) -> Tokens:
        """The length of every example, which is 1: training is counted in images."""
        return np.ones(len(self.images), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        try:
            with _opened(self.images[int(index)], self.root) as image:
                pixels = self.processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        except (OSError, ValueError, SyntaxError) as error:  # Pillow's errors; only the beginning was read before
            raise DataError(f"image {index} of the data cannot be read ({error}); replace or remove it") from error
        return {"pixel_values": pixels, **({} if self.labels is None else {"labels": self.labels[index]})}


def image_examples(part: Part) -> Examples:
    """The images of the rows of one split, as examples.

    Raises:
        DataError: if there are none, or their labels cannot be used.
    """
    labels = class_labels(part) if part.recipe.task.logits is not None else None
    return finished(Images(part, labels), part)


def check_images(part: Part) -> None:
    """Refuse rows that have no image that can be opened or, where there are labels, no label.

    Raises:
        DataError: if there are any, or no column with the images.
    """
    recipe, rows, data = part.recipe, part.rows, part.recipe.data
    require_column(rows, "image_column_name", data.image_column_name)
    root = folder_of(part)
    bad = missing_labels(rows, data.label_column_name) if recipe.task.logits is not None else {}
    for number, value in enumerate(_undecoded(part)):
        if (problem := _problem(value, root)) is not None:
            bad[number] = f"`{data.image_column_name}` {problem}"
    refuse_bad(bad, data, part.split)


def _problem(value: Any, root: Path) -> str | None:
    """The problem of an image as a clause, or None if it can be opened; of most formats, only the beginning is read."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _opened(value, root) as image:
                image.verify()
        return None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    except (OSError, ValueError, TypeError, SyntaxError) as error:  # a broken .png is a SyntaxError to Pillow
        return f"cannot be opened ({error})"


def _opened(value: Any, root: Path) -> Any:
    """The opened image of a cell, which holds a path (relative to `root`) or a dictionary of `datasets`."""
    from PIL import Image

    if isinstance(value, dict):
        return Image.open(BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"])
    return Image.open(root / value)


def _undecoded(part: Part) -> Any:
    """The column of images, as paths or bytes; if they were decoded, all would be in memory."""
    rows, name = part.rows, part.recipe.data.image_column_name
    if isinstance(rows.features[name], datasets.Image):
        rows = rows.cast_column(name, datasets.Image(decode=False))
    return rows[name]
