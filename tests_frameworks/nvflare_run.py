"""FedSSO in NVFlare's simulator: the server optimizer of its FedOpt recipe, beside fedsso's own
simulator."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.recipe import SimEnv
from table import compare

import parity_problem as problem


def main(folder: Path) -> int:
    optimizer = {"local_lr": problem.ALPHA, "local_steps": problem.TAU}
    recipe = FedOptRecipe(
        name="fedsso",
        model=problem.Net(),
        min_clients=len(problem.ROWS),
        num_rounds=problem.ROUNDS,
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
        train_args=str(folder),
        device="cpu",
        optimizer_args={"path": "fedsso.optim.ServerBFGS", "args": optimizer},
    )
    recipe.execute(
        SimEnv(
            num_clients=len(problem.ROWS),
            workspace_root=str(folder / "workspace"),
            log_config="ERROR",
        )
    )
    models = [torch.load(folder / f"{k}.pt") for k in range(problem.ROUNDS)]
    (last,) = (folder / "workspace").rglob("FL_global_model.pt")
    parameters = torch.load(last)["model"]
    models.append(
        torch.cat([torch.as_tensor(parameters[name]).flatten() for name in ("weight", "bias")])
    )
    return compare("nvflare", models)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        sys.exit(main(Path(empty)))
