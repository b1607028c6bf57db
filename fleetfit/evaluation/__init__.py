"""Evaluation on the server: its scope, its jobs, and the columns of its results.

`global` is the largest model that the method trains, on each client's test data, averaged over clients (ScaleFL 4.4);
`local` is each client's own level's model on its own test data, averaged (4.5); for a real device that reports no
budget, the largest level that it has trained; `avg` and `full` are the mean over the levels' models and the largest one
on the whole test set (AdaptiveFL); `mean_over_exits` is the mean over the exits of the full model (ReeFL).

Differs from the paper: ScaleFL evaluates with each batch's own statistics, so that a prediction depends on its
neighbors. The headline here uses static batch-norm statistics, re-estimated for each level from statistics jobs: the
sums of the clients over some of their training data. They belong to a level and are not part of the server's state.
Batch statistics are a second column, which states batch size and order. Federated training itself keeps no running
statistics. ReeFL's mean over the exits is on the whole test set; `mean_over_exits`, `exits` and `ensemble` are means
over the clients, as `global` is, and `test_exits` has the exits on the whole test set.

`personal` is `local` with log p_k - log p added to the logits, p_k the class frequencies of the client's training
labels, p the fleet's (`fleetfit.rounds.class_frequencies`): what the client's own device predicts if it knows which
classes it sees often. It has the logits of `local`, and is no part of it.
"""

from fleetfit.evaluation.collect import (
    check_samples as check_samples,
    evaluate as evaluate,
    evaluate_on_device as evaluate_on_device,
)
from fleetfit.evaluation.jobs import make_failure_record as make_failure_record, make_job as make_job
from fleetfit.evaluation.levels import (
    Statistics as Statistics,
    build_level_module as build_level_module,
    find_top_level as find_top_level,
    find_trained_levels as find_trained_levels,
    has_batch_norm as has_batch_norm,
)
from fleetfit.evaluation.scope import EvaluationPart as EvaluationPart, EvaluationScope as EvaluationScope
from fleetfit.evaluation.statistics import estimate_statistics as estimate_statistics
