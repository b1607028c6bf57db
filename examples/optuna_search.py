"""Optuna searches for two keys of a run file; trials that fall behind are cut off while they run.

    pip install optuna
    python examples/optuna_search.py

Trials are judged on validation data, so that the test data stay unseen. What `on_round` raises stops the run; its
folder stays, and `fleetfit resume` would go on with it.
"""

import optuna

import fleetfit as ff

BASE = {
    "rounds": 12,
    "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 20}},
    "evaluate": {"every": 2, "split": "validation", "batch_norm": ["static"]},
}


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 0.01, 0.3, log=True)
    beta = trial.suggest_float("beta", 0.0, 0.5)

    def on_round(report):
        if "evaluate" in report:
            trial.report(report["evaluate"]["static"]["local"], report["round"])
            if trial.should_prune():
                raise optuna.TrialPruned

    run = ff.run(
        BASE, local={"lr": lr}, method={"beta": beta}, on_round=on_round, out=f"runs/search/trial-{trial.number}"
    )
    return run.accuracy("local")


def search(trials: int = 20) -> optuna.Study:
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )  # fmt: skip
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    best = search().best_trial
    print(f"{100 * best.value:.2f}% on validation data with {best.params}")
