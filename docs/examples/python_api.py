"""A model trained, measured and looked at from Python, on any CPU in half a minute: python python_api.py FOLDER"""

import sys
from pathlib import Path

import posttrain as pt

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/python")
    sft = pt.sft("debug/sft", folder / "sft", run={"seed": 1})
    rl = pt.rl("debug/rl", folder / "rl", model={"path": sft.model}, optim__lr=1e-4, run__steps=3)
    print("reward by step:", rl.metrics["reward"])
    print("of", len(rl.metrics.columns), "metrics; first completion:", repr(rl.samples[0]["completion"]))
    print(rl.metrics.frame[["step", "reward", "signal/share", "time/step"]])

    graded = pt.evaluate("debug/eval", folder / "eval", model={"path": rl.model})
    print("accuracy:", graded.summary["accuracy"])
    models = [{"model": str(run.model), "parameters": {"weight": 0.5}} for run in (sft, rl)]
    merged = pt.merge({"merge_method": "linear", "models": models}, folder / "merged")
    print("merged:", merged.model, "is", merged.status)

    recipe = pt.load_recipe("debug/rl", optim={"lr": 3e-5})
    print(recipe.resolved["optim"]["lr"], "by the", recipe.origins["optim.lr"])
    try:
        pt.rl("debug/rl", optim={"learning_rate": 1e-5})
    except pt.PosttrainError as error:
        print(error)
