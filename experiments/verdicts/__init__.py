"""What the papers claim, judged from stored results: `experiments/claims.toml` and `experiments/results/*.json`.

`make results` writes `docs/results.md`. `claims` reads what is claimed, `stored` what was run, `judging` holds one
against the other, `page`, `measured` and `figures` show it.
"""
