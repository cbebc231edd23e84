"""A batch becomes an update. The learner knows no algorithm and no agent; see `strop.learner.learner.Learner`."""
