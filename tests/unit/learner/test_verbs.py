"""The learner's verbs: the same on both sides of the process border, for every policy and process."""

import inspect

from strop.config import load
from strop.learner.child import HeldPolicy
from strop.learner.client import LearnerClient
from strop.learner.model_weights import ModelWeights
from strop.learner.process import LearnerProcess
from strop.learner.verbs import LearnerSettings, LearnerVerbs, WeightVerbs


def test_client_and_child_have_every_verb_with_the_same_arguments() -> None:
    pairs = ((LearnerVerbs, HeldPolicy), (WeightVerbs, ModelWeights))
    verbs = {
        name: (verb, done_by)
        for declared, done_by in pairs
        for name, verb in inspect.getmembers(declared, inspect.isfunction)
        if name[0] != "_"
    }
    assert {"score", "update", "begin_save", "finish_save", "restore", "digest", "load"} <= verbs.keys()
    assert {"write", "export_handles"} <= verbs.keys()
    for name, (verb, done_by) in verbs.items():
        arguments = list(inspect.signature(verb).parameters)
        mirror = getattr(LearnerClient, name)
        assert inspect.iscoroutinefunction(mirror), name
        assert list(inspect.signature(mirror).parameters) == arguments, name
        assert list(inspect.signature(getattr(done_by, name)).parameters) == arguments, name
        assert inspect.signature(mirror).return_annotation == inspect.signature(verb).return_annotation, name


async def test_two_processes_hold_two_policies(folder, tmp_path) -> None:
    both = [LearnerProcess(tmp_path / f"{n}.log") for n in range(2)]
    try:
        for process, context in zip(both, (64, 32), strict=True):
            one = load(learner={"device": "cpu"}, policy={"context": context})
            await process.start(LearnerSettings.of(one, folder, serve=context == 32))
        assert [process.context for process in both] == [64, 32]
        assert await both[0].of().digest() == await both[1].of().digest()
        await both[0].of().begin_save(tmp_path / "checkpoint", {"version": "1.1"})
        await both[0].of().finish_save()
        assert await both[1].of().restore(tmp_path / "checkpoint") == {"version": "1.1"}
    finally:
        for process in both:
            await process.close()
