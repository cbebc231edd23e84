"""Shells complete commands, options, choices and settings; bare `strop` says what there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import main, parser, training_run


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    script = tmp_path_factory.mktemp("completion") / f"strop.{request.param}"
    made = subprocess.run(
        [sys.executable, "-m", "strop.cli", "completion", request.param], capture_output=True, text=True, check=True
    )
    script.write_text(made.stdout)
    return request.param, script


def completed(shell: tuple[str, Path], *words: str) -> set[str]:
    """What the shell offers for the last of the words."""
    name, script = shell
    if name == "bash":
        given = f"COMP_WORDS=(strop {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; _strop 2>/dev/null"
        code = f'source {script}; {given}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    elif name == "fish":
        code = f"source {script}; complete -C 'strop {' '.join(words)}'"
    else:  # zsh completes only where somebody types: what it would offer is caught on its way to the screen
        caught = (
            'compadd() { while [[ $1 == -* && $1 != -- ]]; do [[ $1 == -S ]] && shift; shift; done; print -l -- "$@" }'
        )
        described = "_describe() { print -l -- ${${(P)2}%%:*} }; _files() { }; compdef() { }"
        given = f"words=(strop {' '.join(map(repr, words))}); CURRENT={len(words) + 1}; PREFIX={words[-1]!r}"
        code = f"{caught}; {described}; source {script}; {given}; _strop"
    done = subprocess.run([name, "-c", code], capture_output=True, text=True, env=os.environ | {"HOME": "/nonexistent"})
    found = {line.split("\t")[0] for line in done.stdout.splitlines()}
    return {word for word in found if word.startswith(words[-1])}


def test_shells_complete_what_there_is(shell: tuple[str, Path]) -> None:
    assert completed(shell, "tr") == {"train"}
    assert {"--steps", "--set", "--seed"} <= completed(shell, "train", "--s")
    assert "--probe" not in completed(shell, "train", "--p")
    assert completed(shell, "demo", "--task", "c") == {"calc", "chain"}
    assert completed(shell, "rollouts", "--status", "f") == {"failed"}
    assert completed(shell, "config", "pp") == {"ppo"}
    assert "learner.optim" in completed(shell, "config", "learner")
    assert completed(shell, "completion", "z") == {"zsh"}


def test_shells_complete_settings(shell: tuple[str, Path]) -> None:
    assert completed(shell, "train", "--set", "loop.st") == {"loop.steps=", "loop.staleness=", "loop.start_ahead="}
    assert completed(shell, "eval", "--set", "learner.optim.l") == {"learner.optim.lr="}
    assert "algorithm.settings.lam=" in completed(shell, "train", "--set", "algorithm.settings.l")  # PPO's


def test_bare_strop_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "rollouts" in said
    assert "strop demo" in said


@pytest.mark.parametrize(
    ("typed", "usage", "says"),
    [
        ("train a.py:f --lrr 3", "usage: strop train ", "--lrr is not an option here. Fix: write --lr"),
        ("train a.py:f --lrr=3", "usage: strop train ", "--lrr is not an option here. Fix: write --lr"),
        ("trian", "usage: strop [", "trian is not a command. Fix: write train"),
        ("search biuld a b", "usage: strop search ", "biuld is not a command. Fix: write build"),
        ("runs --zzzz", "usage: strop runs ", "--zzzz is not an option here"),
        ("export a b c", "usage: strop export ", "c is not an option here"),
    ],
)
def test_what_is_not_known_is_refused_with_its_own_usage(
    typed: str, usage: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(typed.split())
    said = capsys.readouterr().err
    assert (refused.value.code, said.startswith(usage)) == (2, True), said
    assert said.endswith(f"{says}\n")


def test_the_models_that_can_be_named_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "serve"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert all(name in said for name in ("strop/nano", "smollm2-135m", ".gguf", "Hugging Face")), said


def test_short_forms_stand_for_settings() -> None:
    """The last one wins, however it is written."""
    given = parser().parse_args(["train", "--steps", "3", "--set", "loop.steps=4", "--lr", "1e-4", "--groups", "2"])
    assert given.set == ["loop.steps=3", "loop.steps=4", "learner.optim.lr=1e-4", "loop.groups=2"]
    assert parser().parse_args(["demo", "--steps=5"]).set == ["loop.steps=5"]
    assert parser().parse_args(["demo"]).set == []
    assert list(training_run.SHORT) == ["--steps", "--lr", "--groups"]
