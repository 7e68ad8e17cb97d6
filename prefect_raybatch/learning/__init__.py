"""Learns from a job's earlier runs how many engines share a GPU, and their `max_num_seqs`. No I/O.

`score.py` measures a run, `predict.py` predicts the rate of another arrangement, `rules.py`
decides. `runs/arrangement.py` reads earlier runs and records the decision.
"""
