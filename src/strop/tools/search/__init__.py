"""Search for question-answering agents: an index over passages, a server, and the tools that agents call.

    corpus.jsonl ──build──▶ index folder ──serve──▶ POST /retrieve, /access ◀── Search(url).search, .access ◀── agent

The server answers as Search-R1's retrieval server does, so that agents written for that one need no change.

Left out: BM25 and dense scores mixed in one index, reranking, passages added to an index that is built, and keys
(who reaches the server may search).
"""

from strop.tools.search.client import Search

__all__ = ["Search"]
