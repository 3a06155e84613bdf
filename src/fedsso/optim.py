"""FedSSO's server step as a torch optimizer.

It is for NVFlare, pfl, or any loop that averages what its clients send. `p.grad` holds the clients'
mean of x - v: the model they were sent minus the one they came back with. It is not divided by
anything. `local_lr` is the paper's alpha, `local_steps` its tau, `lr` its eta. The first two only
set the unit in which numbers are shown, unless guard is "adaptive" or "none": then they must be
what the clients use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .algorithm.checks import HUGE
from .algorithms.fedsso import FedSSO
from .algorithms.memory import KINDS
from .errors import InputError, number, unknown
from .server import Server

log = logging.getLogger("fedsso")
FIXED = ("R", "form", "guard", "pairs", "m")  # the state is made for these: they stay as they are
RECORD = ("lam", "Lam", *FIXED)
GROUP = ("lr", "local_lr", "local_steps", *RECORD)


class ServerBFGS(Optimizer):
    """Server-side BFGS on the clients' averaged update.

    The parameters that require a gradient when the optimizer is made are treated as one vector, in
    order. A parameter whose `grad` is None counts as unmoved. With lr = 0, or if every `grad` is
    None, a step does nothing. If the mean is not finite, that is logged and the model is kept.
    memory="clients" is refused, because the optimizer sees the mean alone; "auto" means "none".

    The group's lr (by a scheduler), local_lr, local_steps, lam and Lam may change between steps;
    R, form, guard, pairs and m may not. `server` tells the round `k` and `diagnostics()`.
    `state_dict()` is a copy of all that is needed to go on.

    >>> x = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = ServerBFGS([x])
    >>> x.grad = torch.tensor([0.2, 0.4])  # clients came back with 0.8 and 1.6
    >>> optimizer.step()
    >>> x.detach()
    tensor([0.8000, 1.6000])
    """

    def __init__(
        self,
        params: ParamsT,
        local_lr: float | None = None,
        local_steps: float | None = None,
        lr: float = 1.0,
        R: int | None = None,
        lam: float = 1e-4,
        Lam: float = 9999.0,
        form: str = "bfgs",
        guard: str = "cautious",
        pairs: int = 200,
        m: int = 20,
        memory: str = "auto",
    ) -> None:
        _check_memory(memory)
        group = {
            "lr": lr,
            "local_lr": local_lr,
            "local_steps": local_steps,
            "lam": lam,
            "Lam": Lam,
            "R": R,
            "form": form,
            "guard": guard,
            "pairs": pairs,
            "m": m,
        }
        self.server = _server(group)
        super().__init__(params, _defaults(self.server))
        self._sizes = self._layout()
        if not any(self._sizes):
            raise InputError(
                "no parameter requires a gradient, so there is nothing to train; unfreeze one first"
            )
        if any(p.is_complex() for p in self._trained()):
            raise InputError(
                "complex parameters are not supported; hold them as real ones (torch.view_as_real)"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group of parameters; a second one is refused."""
        if self.param_groups:
            raise InputError(
                "ServerBFGS takes one parameter group, got another: the curvature ties all "
                "parameters together; give them in one list to a new ServerBFGS"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        loss: float | None = None,
    ) -> None:
        """One server step from the clients' mean in `p.grad`.

        `loss` is the clients' mean training loss in this round, if they report it; the cautious
        guard looks at it.
        """
        if closure is not None:
            raise InputError(
                "step() takes no closure: it would overwrite the clients' mean of x - v "
                "with gradients; call step()"
            )
        trained = self._trained()
        group = self.param_groups[0]
        self._check_unchanged()
        if group["lr"] == 0 or all(p.grad is None for p in trained):
            return
        now = _server(group)
        self.server.record = now.record
        self.server.local_steps = now.local_steps
        x = _flat(trained)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        mean = _flat(grads).to(x.dtype)
        if not (mean / group["local_lr"] / now.local_steps).isfinite().all():
            log.warning(
                "round %d: the clients' mean is not finite; the model is kept", self.server.k + 1
            )
            return
        before = copy(self.server)
        new = self.server.advance(x, -mean, loss=loss)
        if not _fits(new, trained):
            log.warning("round %d: the step is not finite; the model is kept", self.server.k)
            self.server = before
            return
        _write(new, trained)

    def _trained(self) -> list[Tensor]:
        """The parameters that require a gradient."""
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    def _layout(self) -> list[int]:
        """The size of every parameter, 0 of a frozen one."""
        return [p.numel() if p.requires_grad else 0 for p in self.param_groups[0]["params"]]

    def _check_unchanged(self) -> None:
        """Refuse a model or settings that the kept curvature does not belong to."""
        if self._layout() != self._sizes:
            raise InputError(
                "a parameter was frozen, unfrozen or resized; make a new ServerBFGS for the new "
                "model"
            )
        changed = [name for name in FIXED if self.param_groups[0][name] != self.defaults[name]]
        if changed:
            raise InputError(
                f"{', '.join(changed)} cannot change between steps; make a new ServerBFGS"
            )

    def state_dict(self) -> dict[str, Any]:
        """A copy of the curvature, beside torch's parameter groups.

        The curvature stands as the first parameter's state; before the first step there is none.
        """
        found = super().state_dict()
        tensors = {name: tensor.clone() for name, tensor in self.server.tensors().items()}
        state = {}
        if tensors:
            state[0] = {"sizes": torch.tensor(self._sizes), **tensors}
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Settings are taken over as torch does it, the curvature in the precision it was saved in.
        """
        tensors = self._saved(state_dict)
        x = _flat(self._trained())
        server = Server(self.server.record, self.server.local_steps)
        if tensors:
            server.restore(x, tensors)
        super().load_state_dict({**state_dict, "state": {}})
        self.server = server

    def _saved(self, state_dict: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of a saved state; none if it was saved before the first step.

        It is refused unless it was saved by an optimizer with the same settings and model.
        """
        groups = state_dict.get("param_groups") or [{}]
        group = groups[0]
        missing = [name for name in GROUP if name not in group]
        if missing:
            raise InputError(
                f"the saved state is not one of ServerBFGS: its group lacks {', '.join(missing)}"
            )
        for name in FIXED:
            own = self.defaults[name]
            if group[name] != own:
                raise InputError(
                    f"the saved state was made with {name}={group[name]!r}, this optimizer with "
                    f"{name}={own!r}; make it with the same settings"
                )
        tensors: dict[str, Tensor] = next(iter(state_dict["state"].values()), {})
        if tensors:
            self._check_model(tensors["sizes"].tolist(), tensors["server.x"].dtype)
        return tensors

    def _check_model(self, sizes: list[int], dtype: torch.dtype) -> None:
        """Refuse a saved state of a model with other parameters."""
        own = _wide(self._trained())
        if sizes == self._sizes and dtype == own:
            return
        raise InputError(
            f"the saved state is that of another model: {sum(sizes)} trained numbers of {dtype} in "
            f"{len(sizes)} tensors; this one has {sum(self._sizes)} of {own} in "
            f"{len(self._sizes)} (sizes {self._sizes[:4]}..., saved {sizes[:4]}...); make the "
            "optimizer for the model that was saved"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "server": self.server, "_sizes": self._sizes}


def _check_memory(memory: str) -> None:
    """Refuse a memory of single clients, and a word that is none of the record's."""
    if memory == "clients":
        raise InputError(
            "memory='clients' needs what each client sent, but ServerBFGS sees their mean alone; "
            "use memory='none', or fedsso.flower.FedSSO"
        )
    if memory not in KINDS:
        raise unknown("memory", memory, KINDS)


def _server(group: Mapping[str, Any]) -> Server:
    """A new server with the settings of a parameter group."""
    local_lr = group["local_lr"]
    local_steps = group["local_steps"]
    guard = group["guard"]
    if guard in ("adaptive", "none") and (local_lr is None or local_steps is None):
        raise InputError(
            f"guard={guard!r} needs local_lr and local_steps, the step and the number of local "
            "steps that clients use; leave guard out if you do not know them"
        )
    alpha = 1.0 if local_lr is None else local_lr
    for name, value in (("lr", group["lr"]), ("local_lr", alpha)):
        if not 0 < number(name, value) < HUGE:
            raise InputError(f"{name} must be > 0 and finite, got {name}={value}")
    fields = {name: group[name] for name in RECORD}
    record = FedSSO(alpha=alpha, eta=group["lr"], **fields)
    return Server(record, 1.0 if local_steps is None else local_steps)


def _defaults(server: Server) -> dict[str, Any]:
    """The settings of a server as those of a parameter group."""
    record = server.record
    group = {
        "lr": record.eta,
        "local_lr": record.alpha,
        "local_steps": server.local_steps,
    }
    for name in RECORD:
        group[name] = getattr(record, name)
    return group


# ---- tensors as one vector ----


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    """The precision to compute in: float64 if any tensor has it, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one new vector, on the device of the first."""
    device = tensors[0].device
    dtype = _wide(tensors)
    return torch.cat([t.detach().reshape(-1).to(device, dtype) for t in tensors])


def _fits(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a vector is still finite once it is rounded to what the tensors can hold."""
    for tensor, part in zip(tensors, _parts(x, tensors), strict=True):
        if not part.to(tensor.dtype).isfinite().all():
            return False
    return True


def _write(x: Tensor, tensors: Sequence[Tensor]) -> None:
    """A vector into tensors, rounded to what they can hold."""
    for tensor, part in zip(tensors, _parts(x, tensors), strict=True):
        tensor.copy_(part)


def _parts(x: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into the shapes of tensors."""
    sizes = [t.numel() for t in tensors]
    parts = x.split_with_sizes(sizes)
    return [part.view(t.shape) for t, part in zip(tensors, parts, strict=True)]
