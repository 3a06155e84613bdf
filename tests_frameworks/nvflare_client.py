"""A plain FedAvg client for NVFlare, which knows nothing of FedSSO; it also notes the models it is
sent."""

from __future__ import annotations

import sys
from pathlib import Path

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel

import parity_problem as problem


def main(notes: Path) -> None:
    flare.init()
    site = flare.get_site_name()
    data = problem.clients()[int(site.removeprefix("site-")) - 1]
    while flare.is_running():
        received = flare.receive()
        x = torch.cat(
            [torch.as_tensor(received.params[name]).flatten() for name in ("weight", "bias")]
        )
        if site == "site-1":
            torch.save(x, notes / f"{received.current_round}.pt")
        v = problem.local(x, data)
        params = {"weight": v[:-1].reshape(1, -1), "bias": v[-1:]}
        flare.send(
            FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": len(data[1])})
        )  # the weight in the mean


if __name__ == "__main__":
    main(Path(sys.argv[1]))
