r"""Queries and the documents that they should find (`--retrieval_file`), for figures of retrieval.

    {"query": "How tall is the tower?", "document": "The tower is 330 metres tall."}
    {"query": "How tall is the tower?", "document": "With its antennas, it is 330 metres high."}
    {"query": null, "document": "The bridge has four arches."}

Every row has a document that its query should find. Rows with the same query name several such documents; a row without
a query adds a document that no query should find. Every query is compared with every different document of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.file_checks import DOCUMENT, QUERY
from hf_linear_attention.training.data.packing import Documents
from hf_linear_attention.training.data.rows import bad_text, load_rows, require_column, without_bad
from hf_linear_attention.training.data.sentence_files import DOCUMENT_PROMPTS, QUERY_PROMPTS, SentenceFiles
from hf_linear_attention.training.data.tokenization import tokenize_texts
from hf_linear_attention.training.recipe import DataArguments, TaskArguments


@dataclass(frozen=True)
class Retrieval:
    """The different queries and documents of a file, and the numbers of the documents that each query should find."""

    queries: list[str]
    documents: list[str]
    relevant: list[set[int]]

    def examples(
        self, tokenizer: PreTrainedTokenizerBase, files: SentenceFiles, options: TaskArguments, max_length: int
    ) -> Documents:
        """All texts with their prompts as examples, first the queries; each is cut to `max_length` tokens."""
        query = files.prompt("query_prompt_name", options.query_prompt_name, QUERY_PROMPTS)
        document = files.prompt("document_prompt_name", options.document_prompt_name, DOCUMENT_PROMPTS)
        texts = [query + text for text in self.queries] + [document + text for text in self.documents]
        tokens = tokenize_texts(texts, tokenizer, add_special_tokens=True, truncation=True, max_length=max_length)
        # A tokenizer without special tokens makes nothing of some texts, and their embedding is that of padding.
        empty = np.array([tokenizer.pad_token_id or 0], np.int64)
        return Documents([ids if len(ids) else empty for ids in tokens], None)


def read_retrieval(path: str) -> Retrieval:
    """The queries and documents of a file, in its order.

    Raises:
        DataError: if a row has no document, or no row has a query.
    """
    data = DataArguments(validation_file=path)
    rows = load_rows(data, "validation", {QUERY: (str, type(None)), DOCUMENT: str})
    if rows is None:
        raise RuntimeError("the file is named above")
    for name in (QUERY, DOCUMENT):
        require_column(rows, "retrieval_file", name)
    bad: dict[int, str] = {}
    for number, (query, document) in enumerate(zip(rows[QUERY], rows[DOCUMENT], strict=True)):
        if not isinstance(document, str) or not document.strip():
            bad[number] = bad_text(DOCUMENT, document) if not isinstance(document, str) else f"`{DOCUMENT}` is empty"
        elif query is not None and not isinstance(query, str):
            bad[number] = bad_text(QUERY, query)
    rows = without_bad(rows, bad, data, "validation")
    documents: dict[str, int] = {}
    relevant: dict[str, set[int]] = {}
    for query, document in zip(rows[QUERY], rows[DOCUMENT], strict=True):
        place = documents.setdefault(document, len(documents))
        if query is not None and query.strip():
            relevant.setdefault(query, set()).add(place)
    if not relevant:
        raise DataError(f"`--retrieval_file {path}` has no query; fill the column `{QUERY}`")
    return Retrieval(list(relevant), list(documents), list(relevant.values()))
