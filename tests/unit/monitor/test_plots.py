"""Pictures of rewards: whatever rewards and agents are called, and however many there are."""

from pathlib import Path

from PIL import Image

from strop.monitor.plots import GREY, PANELS, draw_agents, plot_rewards


def test_names_are_texts_and_not_formulas(tmp_path: Path) -> None:
    """A run that is done must not fail for its picture."""
    draw_agents(tmp_path / "a.png", {"a$b_c_d$": {"left$": [(1, 0.0), (2, 1.0)], "right_$x": [(1, 0.5)]}})
    assert (tmp_path / "a.png").stat().st_size > 5000
    plot_rewards(tmp_path / "b.png", [(1, 0.5)], {"test$": [(0, 1.5)]}, "a$b_c_d$")
    assert (tmp_path / "b.png").stat().st_size > 5000


def test_the_loss_is_drawn_where_there_is_no_reward(tmp_path: Path) -> None:
    losses = [(1, 2.5), (2, 0.5)]
    for number, evaluations in enumerate([{}, {"test": [(0, 0.25), (2, 0.75)]}]):
        file = tmp_path / f"{number}.png"
        plot_rewards(file, [], evaluations, "sft", losses)
        with Image.open(file) as drawn:
            grey = sum(pixel == tuple(bytes.fromhex(GREY[1:])) for pixel in drawn.convert("RGB").getdata())
        assert grey > 500


def test_one_point_is_seen(tmp_path: Path) -> None:
    def count(colour: str) -> int:
        with Image.open(tmp_path / "one.png") as drawn:
            return sum(pixel == tuple(bytes.fromhex(colour)) for pixel in drawn.convert("RGB").getdata())

    for colour, rewards, losses in ((GREY[1:], [], [(1, 2.5)]), ("2563eb", [(1, 0.5)], [])):
        plot_rewards(tmp_path / "one.png", rewards, {}, "sft", losses)
        one = count(colour)
        plot_rewards(
            tmp_path / "one.png", [(1, float("nan"))] if rewards else [], {}, "sft", losses and [(1, float("nan"))]
        )
        assert one > count(colour) + 30


def test_hundreds_of_rewards_are_not_all_drawn(tmp_path: Path) -> None:
    lines = {f"r{n:03d}": {"left": [(1, 0.0), (2, 1.0)]} for n in range(300)}
    draw_agents(tmp_path / "many.png", lines)
    draw_agents(tmp_path / "few.png", dict([*lines.items()][:PANELS]))
    with Image.open(tmp_path / "many.png") as many, Image.open(tmp_path / "few.png") as few:
        assert many.size == few.size
