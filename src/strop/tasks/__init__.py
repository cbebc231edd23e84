"""Where tasks come from (`load`), and which one is next (`sampling`).

load ─┬─ files    .jsonl, .csv ───────┐
      ├─ arrow    .parquet ───────────┤
      ├─ folders  train.*, test.* ────┼──▶ rows ──▶ list[Task] ──▶ hold_out, group, evaluation
      ├─ hub      Hugging Face ───────┤
      └─ FILE.py:function, iterables ─┘
"""
