"""Indexes by meaning: vectors are what the model gives, and passages come in the order of the cosine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from strop.cli import main
from strop.errors import ModelError
from strop.models.names import resolve
from strop.tools.search import dense
from strop.tools.search.dense import Dense
from strop.tools.search.documents import Documents
from strop.tools.search.encoder import DEFAULT, PACKAGE, Encoder, find_folder, read_pooling
from strop.tools.search.index import Index, build
from tests.unit.tools.test_search_index import TOWNS, corpus, quiet

NANO = "strop/nano"
SENTENCES = [
    f"{a} {b} {c} by {n}."
    for n, (a, b, c) in enumerate(
        (a, b, c)
        for a in ("Add", "Double", "Halve", "Count")
        for b in ("the first", "every", "one")
        for c in ("number", "word", "line", "apple", "river")
    )
]


@pytest.fixture(scope="module")
def nano() -> Path:
    return resolve(NANO)


def vector(folder: Path, text: str, pooling: str) -> np.ndarray:
    """One text alone, with nothing of the code that is tested."""
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    ids = [id for id, counts in zip(encoded.ids, encoded.attention_mask, strict=True) if counts]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()
    found = states.mean(0) if pooling == "mean" else states[0]
    return found / np.linalg.norm(found)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_do_not_depend_on_what_else_is_encoded(nano: Path, pooling: str) -> None:
    texts = ["Add 2 and 2.", "One", "A much longer line of words that go on, and on, and on, until it ends."] * 15
    vectors = Encoder(nano, pooling)(texts)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    for number in (0, 1, 2, 44):
        assert np.abs(vectors[number] - vector(nano, texts[number], pooling)).max() < 1e-5


def test_passages_come_in_the_order_of_the_cosine(tmp_path: Path, nano: Path) -> None:
    path = corpus(tmp_path, [{"id": n, "contents": text} for n, text in enumerate(SENTENCES)])
    about = Dense(model=str(nano), query_prefix="query: ", passage_prefix="passage: ")
    build(path, tmp_path / "index", by=about, progress=quiet)
    index = Index.open(tmp_path / "index")
    assert index.about.dense == about
    assert f"{tmp_path}/index/dense.faiss" in Path("/proc/self/maps").read_text()
    assert not list((tmp_path / "index").glob("*.part"))
    encoder = Encoder(nano, "mean")
    passages = encoder([f"passage: {text}" for text in SENTENCES])
    queries = ["Double every apple", "Count the rivers", "halve it"]
    found = index.search(queries, 7)
    for query, some in zip(queries, found, strict=True):
        cosines = passages @ encoder([f"query: {query}"])[0]
        order = np.argsort(-cosines, kind="stable")[:7]
        assert [int(one.passage.id) for one in some] == order.tolist()
        assert np.allclose([one.score for one in some], cosines[order], atol=1e-5)
    assert len(index.search(["x"], 1000)[0]) == len(SENTENCES)


def test_a_large_index_looks_at_the_nearest_cells(tmp_path: Path, nano: Path) -> None:
    build(
        corpus(tmp_path, [{"id": n, "contents": text} for n, text in enumerate(SENTENCES * 3)]),
        tmp_path / "flat",
        by=Dense(model=str(nano)),
        progress=quiet,
    )
    large = tmp_path / "large"
    shutil.copytree(tmp_path / "flat", large)
    about = Dense(model=str(nano))
    dense.build(large, Documents(large), about, dense.load_encoder(about), quiet, flat=10)
    assert (large / "dense.faiss").read_bytes()[:4] == b"IwFl"  # an inverted file
    index = Index.open(large)
    for one, (found, *_) in zip(SENTENCES[:20], index.search(SENTENCES[:20], 1), strict=True):
        assert found.passage.contents == one


def test_another_model_than_the_one_of_the_index_is_noticed(tmp_path: Path, nano: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(nano, model)
    build(corpus(tmp_path, TOWNS), tmp_path / "index", by=Dense(model=str(model)), progress=quiet)
    about = json.loads((tmp_path / "index/index.json").read_text())
    about["dense"]["pooling"] = "cls"
    (tmp_path / "index/index.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="is not the model"):
        Index.open(tmp_path / "index")
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="there is no folder or file"):
        Index.open(tmp_path / "index")


def test_how_tokens_are_pooled_is_read_from_the_model(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    for said, pooling in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ):
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(said))
        assert read_pooling(tmp_path) == pooling
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    with pytest.raises(ModelError, match="lasttoken"):
        read_pooling(tmp_path)


def test_a_model_that_is_none_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus(tmp_path, TOWNS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    command = ["search", "build", str(path), str(tmp_path / "index"), "--dense", "--model", str(tmp_path / "model")]
    assert main(command) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["corpus.jsonl", "model"]


def test_minilm_finds_what_is_said_in_other_words(tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE)
    path = corpus(tmp_path, TOWNS)
    assert main(["search", "build", str(path), str(tmp_path / "index"), "--dense", "--json"]) == 0
    index = Index.open(tmp_path / "index")
    assert index.about.dense == Dense()
    queries = {"birthplace of a famous physicist": "2", "a city in the Alpine republic": "3", "music group": "5"}
    found = index.search(list(queries), 1)
    assert [some[0].passage.id for some in found] == list(queries.values())
    folder = find_folder(DEFAULT)
    assert np.abs(Encoder(folder, "mean")(["music group"])[0] - vector(folder, "music group", "mean")).max() < 1e-5
