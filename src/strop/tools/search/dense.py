"""Search by meaning: vectors of a sentence model, kept and compared with faiss.

Up to FLAT passages every vector is compared, which is exact. Above that they are put into cells, and a query is
compared with those in the cells nearest to it. Either index is memory-mapped.

Left out: compressed vectors. While an index is built its vectors are in memory, 4 bytes per number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from strop.errors import ModelError
from strop.tools.search.base import Hits, Progress, import_optional
from strop.tools.search.documents import Documents
from strop.tools.search.encoder import DEFAULT, Encoder, Pooling, find_folder

FLAT = 200_000
CELLS_LOOKED_AT = 1 / 16
BLOCK = 1024
"""Passages that are encoded between two writes."""
PER_CELL = 64
"""Vectors per cell that the cells are found with."""
SAME = 0.999
"""Cosine between a passage's vector then and now: below that the model is not the one of the index."""


class Dense(Struct, frozen=True, kw_only=True):
    """How an index makes vectors. Without `pooling` it is as the model's folder says. Some models want a word before
    each text: e5's want "query: " and "passage: "."""

    model: str = DEFAULT
    pooling: Pooling | None = None
    query_prefix: str = ""
    passage_prefix: str = ""


def load_encoder(about: Dense) -> Encoder:
    """The model, loaded. Raises `ModelError`, or `ConfigError` if a library is missing."""
    import_optional("faiss")
    return Encoder(find_folder(about.model), about.pooling)


def build(
    folder: Path, documents: Documents, about: Dense, encoder: Encoder, progress: Progress, flat: int = FLAT
) -> None:
    """Make the vectors of all passages, and an index over them."""
    faiss, stage, done = import_optional("faiss"), folder / "vectors.part", 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        progress("encoding passages", done, len(documents))

    progress("encoding passages", 0, len(documents))
    with stage.open("wb") as file:
        for first in range(0, len(documents), BLOCK):
            some = range(first, min(first + BLOCK, len(documents)))
            file.write(encoder([about.passage_prefix + documents[number].contents for number in some], tick).data)
    vectors = np.memmap(stage, np.float32, "r", shape=(len(documents), encoder.size))
    index = faiss.IndexFlatIP(encoder.size) if len(vectors) <= flat else _cells(faiss, vectors)
    for first in range(0, len(vectors), BLOCK * 16):
        index.add(np.array(vectors[first : first + BLOCK * 16]))
    faiss.write_index(index, str(folder / "dense.faiss"))
    np.save(folder / "probe.npy", vectors[0])
    del vectors
    stage.unlink()


def _cells(faiss: Any, vectors: np.ndarray[Any, Any]) -> Any:
    """An index of about 4 sqrt(n) cells, found from a sample."""
    count, size = vectors.shape
    cells = int(4 * count**0.5)
    chosen = np.random.default_rng(0).permutation(count)[: PER_CELL * cells]
    index = faiss.index_factory(size, f"IVF{cells},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.array(vectors[np.sort(chosen)]))
    index.nprobe = max(1, int(cells * CELLS_LOOKED_AT))
    return index


class DenseSearch:
    """An index as `build` made it. One call at a time: the model uses all cores."""

    def __init__(self, folder: Path, documents: Documents, about: Dense) -> None:
        faiss = import_optional("faiss")
        self._about = about
        self._index = faiss.read_index(str(folder / "dense.faiss"), faiss.IO_FLAG_MMAP_IFC)
        self._encoder = load_encoder(about)
        probe = np.load(folder / "probe.npy")
        (now,) = self._encoder([about.passage_prefix + documents[0].contents])
        if probe.shape != now.shape or float(probe @ now) < SAME:
            raise ModelError(f"{about.model} is not the model that {folder} was built with. Fix: build the index again")

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        vectors = self._encoder([self._about.query_prefix + query for query in queries])
        scores, numbers = self._index.search(vectors, min(topk, self._index.ntotal))
        return [
            [(int(number), float(score)) for number, score in zip(*row, strict=True) if number >= 0]
            for row in zip(numbers, scores, strict=True)
        ]
