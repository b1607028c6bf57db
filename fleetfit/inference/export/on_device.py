"""Predict samples with an exported model and its early exits. Needs only numpy and onnxruntime."""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime


class Model:
    def __init__(self, folder=".", variant="float", threads=1):
        self.config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        if variant not in self.config["onnx"]:
            raise SystemExit(f"no such variant: {variant}. The variants are {', '.join(self.config['onnx'])}.")
        graphs = self.config["onnx"][variant]
        files = [str(Path(folder) / name) for name in graphs["segments"] or [graphs["all_exits"]]]
        self.segments = [onnxruntime.InferenceSession(f, options, providers=["CPUExecutionProvider"]) for f in files]

    def leaves(self, exit, logits, policy):
        z = logits.astype(np.float64) / (policy["temperatures"] or np.ones(exit + 1))[exit]
        p = np.exp(z - z.max(1, keepdims=True))
        p = np.sort(p / p.sum(1, keepdims=True), axis=1)
        entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(1) / np.log(p.shape[1])
        sure = {"max": p[:, -1], "margin": p[:, -1] - p[:, -2], "entropy": 1 - entropy}[policy["measure"]]
        return sure >= policy["thresholds"][exit]

    def predict(self, x, stop=True):
        """Return classes [N], or predicted targets [N, T], and exits [N] (from 1). Without `stop` all use the last."""
        if len(taken := self.config["input"]["shape"]) > 1 and list(x.shape[1:]) != taken:  # images
            raise SystemExit(f"samples have the shape {list(x.shape[1:])}, and the model takes {taken}.")
        x = x.astype(self.config["input"]["dtype"], "C", "same_kind" if x.dtype.kind == "f" else "unsafe")
        carry, remaining = [x], np.arange(len(x))
        is_regression, count = self.config["task"] == "regression", len(self.config["exits"])
        answers = np.zeros((len(x), self.config["classes"])) if is_regression else np.zeros(len(x), int)
        exits = np.full(len(x), count)
        for i, segment in enumerate(self.segments):
            results = segment.run(None, {a.name: c for a, c in zip(segment.get_inputs(), carry)})
            logits, carry = results[0 if len(self.segments) == count else -1], results[1:]
            answers[remaining] = logits if is_regression else logits.argmax(1)
            if stop and self.config["policy"] and i < len(self.segments) - 1:
                stays = ~self.leaves(i, logits, self.config["policy"])
                exits[remaining[~stays]] = i + 1
                remaining, carry = remaining[stays], [c[stays] for c in carry]
            if not len(remaining):
                break
        return answers, exits


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", help=".npy: uint8 images, token ids or encoded rows; or .csv: rows of a table")
    parser.add_argument("--labels", help=".npy with labels, to print the accuracy")
    parser.add_argument("--variant", default="float", help="float, int8 or static-int8")
    parser.add_argument("--stop", action="store_true", help="stop early")
    args = parser.parse_args()
    folder = Path(__file__).parent
    model = Model(folder, args.variant)
    if args.samples.endswith(".npy"):
        x = np.load(args.samples)
    else:
        from rows import read_rows

        x = read_rows(args.samples, folder)
    if args.stop and not (model.config["policy"] and len(model.segments) > 1):
        raise SystemExit("this model was exported without calibration or segments, so it cannot stop early.")
    if not len(x):
        raise SystemExit(f"{args.samples} has no samples.")
    answers, exits = map(np.concatenate, zip(*(model.predict(x[i : i + 64], args.stop) for i in range(0, len(x), 64))))
    names = model.config["class_names"] or range(model.config["classes"])
    if model.config["task"] == "regression":
        print("prediction exit", *(f"{' '.join(f'{p:.7g}' for p in a)} {e}" for a, e in zip(answers, exits)), sep="\n")
    else:
        print("class exit", *(f"{names[c]} {e}" for c, e in zip(answers, exits)), sep="\n")
    if args.labels:
        labels = np.load(args.labels).reshape(answers.shape)
        if model.config["task"] == "regression":
            score = f"mean absolute error {np.abs(answers - labels).mean():.6g}"
        else:
            score = f"accuracy {(answers == labels).mean():.4f}"
        print(f"{score}, mean exit {exits.mean():.2f}")
