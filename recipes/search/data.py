"""Multi-hop questions as tasks: by a data set's name, from a file of one, or made here.

    tasks("hotpotqa")                  from the Hugging Face hub, its validation split as `test`
    tasks("questions.jsonl")           a file: .jsonl, .json or .parquet, in the format of any data set below
    tasks("made")                      a small world of films, people and towns that nobody knows

    {"question": "Who is older, Ed Wood or Tim Burton?", "answers": ["Ed Wood"], "kind": "comparison",
     "paragraphs": [{"title": "Ed Wood", "text": "Edward Davis Wood Jr. (born 1924) was ..."}, ...],
     "titles": ["Ed Wood", "Tim Burton"]}

Where a question brings its paragraphs, it is searched among them; with `search`, the address of a search server, it is
searched there. `python recipes/search/data.py DATA corpus.jsonl` writes all paragraphs of a data set as a corpus for
`strop search build`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop import Task
from strop.errors import TaskError

Row = dict[str, Any]

NAMES: dict[str, dict[str, str]] = {
    "hotpotqa": {"path": "hotpotqa/hotpot_qa", "name": "distractor"},
    "2wikimultihopqa": {"path": "framolfese/2WikiMultihopQA"},
    "musique": {"path": "dgslibisey/MuSiQue"},
    "bamboogle": {"path": "chiayewken/bamboogle"},
    "asearcher": {"path": "inclusionAI/ASearcher-train-data", "data_files": "ASearcher-Base-35k.jsonl"},
    "search-r1": {"path": "PeterJinGo/nq_hotpotqa_train"},
}
"""What the data sets are called here and on the hub. The first three bring paragraphs."""


def tasks(
    data: str = "hotpotqa",
    search: str = "",
    held: int = 200,
    tests: Sequence[str] = (),
    kinds: Sequence[str] = (),
    seed: int = 0,
) -> list[Task]:
    """
    data      a name of NAMES, a file, or "made"
    search    the address of a search server; without it questions are searched among their own paragraphs
    held      questions in the split `test`: of the data's own test questions if it has any, otherwise kept aside
    tests     more data sets, each of which is a split of its name with `held` questions
    kinds     questions of these kinds only (HotpotQA: comparison, bridge; MuSiQue: 2hop, 3hop1, ...)
    """
    found = list({row["question"]: row for row in read(data) if not kinds or row["kind"] in kinds}.values())
    if not found:
        raise TaskError(f"{data} has no questions of the kinds {', '.join(kinds)}: see what its `type` says")
    random.Random(seed).shuffle(found)
    train = [row for row in found if row["split"] == "train"]
    own = [row for row in found if row["split"] == "test"]
    splits = {"train": train if own else train[held:], "test": (own or train)[:held]}
    for name in tests:
        rows = list(read(name))
        rows = [row for row in rows if row["split"] == "test"] or rows
        random.Random(seed).shuffle(rows)  # some are sorted by how hard they are
        splits[Path(name).stem] = rows[:held]
    return [_task(row, split, search) for split, rows in splits.items() for row in rows]


def _task(row: Row, split: str, search: str) -> Task:
    data: Row = {"question": row["question"], "answers": row["answers"], "kind": row["kind"]}
    if search:
        data["search"] = search
    elif row["paragraphs"]:
        data["paragraphs"] = row["paragraphs"]
        data["titles"] = row["titles"]
    else:
        raise TaskError(
            f"{split} has questions without paragraphs of their own ({row['question'][:60]!r}): say where they are "
            "searched, --set tasks_args.search=http://HOST:PORT; `strop search serve` is such a server"
        )
    return Task(id=f"{split}-{row['id']}", split=split, data=data)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(data: str) -> Iterator[Row]:
    """Questions in one shape, whatever shape they came in."""
    if data == "made":
        yield from made()
        return
    for number, (split, row) in enumerate(_file(Path(data)) if Path(data).exists() else _hub(data)):
        if row.get("answerable", True):
            yield one_shape(row, number, split)


def _file(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows: Iterable[Row] = parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        rows = json.loads(path.read_text("utf-8"))
    elif path.suffix == ".jsonl":
        rows = (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())
    else:
        raise TaskError(f"{path} is not a file of questions. Fix: give a .jsonl, .json or .parquet file")
    for row in rows:
        yield str(row.get("split", "train")), row


def _hub(name: str) -> Iterator[tuple[str, Row]]:
    if name not in NAMES:
        raise TaskError(f"there is neither a file nor a data set {name!r}: give a file, made, or {', '.join(NAMES)}")
    try:
        import datasets

        splits = datasets.load_dataset(**NAMES[name])
    except Exception as error:  # without network, without the library, with another version of either
        why = " ".join(str(error).split())[:200]
        raise TaskError(
            f"{NAMES[name]['path']} cannot be fetched from the Hugging Face hub ({why}). Fix: give --data PATH, a "
            "file of it"
        ) from None
    for split, rows in splits.items():
        for row in rows:
            yield "train" if split == "train" else "test", row


def one_shape(row: Row, number: int, split: str) -> Row:
    """A question of any of the data sets.

    >>> row = {"Question": "Who directed Ed Wood?", "Answer": "Tim Burton"}
    >>> one_shape(row, 7, "test")["answers"]
    ['Tim Burton']
    """
    question = row.get("question") or row.get("Question")
    answers = _answers(row)
    if not question or not answers:
        raise TaskError(f"question {number} has no question or no answer; its fields are {', '.join(row)}")
    paragraphs = _paragraphs(row)
    id = str(row.get("id") or row.get("_id") or row.get("qid") or number)
    return {
        "id": id,
        "split": "train" if split == "train" else "test",
        "question": question.strip(),
        "answers": answers,
        "kind": row.get("type") or id.partition("__")[0],  # MuSiQue's ids begin with it
        "paragraphs": [{"title": one["title"], "text": one["text"]} for one in paragraphs],
        "titles": _titles(row, paragraphs),
    }


def _answers(row: Row) -> list[str]:
    fields = ("aug_answer", "answers", "golden_answers", "answer", "Answer")
    found = next((row[name] for name in fields if row.get(name)), [])
    more = row.get("answer_aliases") or []
    return [str(one) for one in (found if isinstance(found, list) else [found])] + [str(one) for one in more]


def _paragraphs(row: Row) -> list[Row]:
    """HotpotQA and 2WikiMultihopQA have a `context`, on the hub as two lists and in their own files as pairs."""
    if "context" in row:
        context = row["context"]
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
        return [{"title": title, "text": "".join(sentences).strip()} for title, sentences in pairs]
    return [one | {"text": one.get("text") or one["paragraph_text"]} for one in row.get("paragraphs") or []]


def _titles(row: Row, paragraphs: list[Row]) -> list[str]:
    """Of the paragraphs that are needed."""
    facts = row.get("supporting_facts")
    if isinstance(facts, dict):
        return sorted(set(facts["title"]))
    if facts:
        return sorted({title for title, _ in facts})
    return row.get("supporting_titles") or sorted({one["title"] for one in paragraphs if one.get("is_supporting")})


# -- made --------------------------------------------------------------------------------------------------------------


FIRST, LAST, TOWNS, NOUNS, COLOURS = (
    line.split()
    for line in (
        "Ada Bela Cleo Dora Egon Finn Gita Hugo Ines Jona Kaja Levi Mira Nils Olga Pavel Rosa Sven Tilda Vito",
        "Abbott Brandt Castell Dorn Eriksen Falk Granger Holm Ivers Jansen Kessler Lund Moreau Novak Orwin",
        "Altona Brenwick Calder Dunmore Elsfield Farrow Glenholt Harwick Ilden Jarrow",
        "Harbour Winter Garden Mirror Lantern Orchard Bridge Island Letter Train River Castle",
        "Red Silent Golden Broken Distant Hidden Last Blue Burning Paper",
    )
)


def made(count: int = 240, seed: int = 0) -> Iterator[Row]:
    """Questions about films, who made them and where those were born; each with its paragraphs among others."""
    draw = random.Random(seed)
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    titles = [f"The {colour} {noun}" for colour in COLOURS for noun in NOUNS]
    draw.shuffle(names)
    draw.shuffle(titles)
    films = [
        {"title": title, "year": draw.randrange(1930, 2020), "by": name, "town": draw.choice(TOWNS)}
        for title, name in zip(titles, names, strict=False)
    ]
    asked: set[str] = set()
    for number in range(count):
        some = draw.sample(films, 4)
        first, second = some[0], some[1]
        if number % 2:
            kind, needed = "bridge", [first["title"], first["by"]]
            question, answer = f"Where was the director of {first['title']} born?", first["town"]
        else:
            kind, needed = "comparison", [first["title"], second["title"]]
            question = f"Which film came out later, {first['title']} or {second['title']}?"
            if first["year"] == second["year"]:
                continue
            answer = max(first, second, key=lambda film: film["year"])["title"]
        if question in asked:
            continue
        asked.add(question)
        paragraphs = [paragraph for film in some for paragraph in _told(film)]
        draw.shuffle(paragraphs)
        yield {
            "id": f"made-{number}",
            "split": "train",
            "question": question,
            "answers": [answer],
            "kind": kind,
            "paragraphs": paragraphs,
            "titles": needed,
        }


def _told(film: Row) -> list[Row]:
    return [
        {"title": film["title"], "text": f"{film['title']} is a {film['year']} film directed by {film['by']}."},
        {"title": film["by"], "text": f"{film['by']} is a film director who was born in {film['town']}."},
    ]


# -- a corpus ----------------------------------------------------------------------------------------------------------


def corpus(data: str) -> Iterator[Row]:
    """Every paragraph of a data set once, as `strop search build` reads them."""
    seen: set[tuple[str, str]] = set()
    for row in read(data):
        for one in row["paragraphs"]:
            if (key := (one["title"], one["text"])) not in seen:
                yield {"id": len(seen), **one}
                seen.add(key)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python recipes/search/data.py DATA corpus.jsonl   (DATA: made, a file, or a data set's name)")
    with Path(sys.argv[2]).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in corpus(sys.argv[1]))
