"""The papers' figures of a run.

Samples by the exit where they left and what levels cost (`pictures`, ScaleFL); where a vision transformer looks
(`attention`, ReeFL). Only the verbs that offer them import this package (docs/adr/0013). `experiments/paper_plans.py`
prints the papers' tables of sizes.
"""
