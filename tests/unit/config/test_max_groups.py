"""Groups that are replaced are no part of a step."""

from strop.config import load
from strop.run.settings import settle


def test_groups_that_are_replaced_are_not_counted_either() -> None:
    plain, replaced = settle(load()), settle(load(sets=["loop.max_groups=32"]))
    assert "filter_groups" not in plain.algorithm.settings
    assert replaced.algorithm.settings["filter_groups"] == ["zero_variance", "group_of_one"]
    chosen = load(sets=["loop.max_groups=32", 'algorithm.settings.filter_groups=["group_of_one"]'])
    assert settle(chosen).algorithm.settings["filter_groups"] == ["group_of_one"]
