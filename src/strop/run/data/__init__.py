"""Learning from stored data: what algorithms of `algorithms/offline.py` are given in the place of agents at work.

    rollouts.py     runs ──▶ samples, with the tokens that were recorded
    transcripts.py  files of conversations ──▶ samples, with the tokens that the chat template writes
    prepare.py      both ──▶ candidates ──▶ items, written into the run's folder as data.jsonl
    dataset.py      data.jsonl, and which of it a step takes
    copies.py       what a step takes ──▶ ended rollouts in the run's own store, like any others

A run reads its sources once, when it begins. From then on data.jsonl is its data: the runs and files that it came from
may change or go.
"""
