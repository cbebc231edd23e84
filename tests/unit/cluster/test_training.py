from strop.cluster.training import halve_micro_batches
from strop.config import load


def test_ranks_that_ran_out_of_memory_begin_with_less_each_time() -> None:
    config = load(learner={"token_budget": 4096})
    halved = halve_micro_batches(config)
    assert halved.learner.start_budget == 2048
    assert halved.learner.token_budget == 4096  # which rollouts are trained on stays the same
    assert halve_micro_batches(halved).learner.start_budget == 1024
