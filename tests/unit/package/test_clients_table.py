"""The table of clients is whole: a row for each that is run, none that does not work."""

from tests.frameworks.clients import CLIENTS
from tests.frameworks.clients_table import read_rows


def test_every_client_has_its_row() -> None:
    rows = read_rows()
    assert [row.client for row in rows] == [client.name for client in CLIENTS]
    assert len({row.client for row in rows}) >= 33
    assert all(all(row.cells) for row in rows)


def test_all_of_them_work() -> None:
    rows = read_rows()
    assert [row for row in rows if row.works.partition(",")[0] != "yes"] == []
    assert [row for row in rows if row.structured.startswith("no")] == [
        row for row in rows if row.structured.startswith("not ")
    ]
