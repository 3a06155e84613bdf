"""The back end for linear layers with activations between them: derivatives written by hand.

Models such as `mclr` and `mlp` are chains z = W a + b, a = act(z), z = W a + b, ... For these the
gradient, the Hessian and its products are a few matrix products per layer, which are done for all
clients and trials at once. That is several times faster than automatic differentiation.

    M, T, B    clients, trials, rows of a batch
    a          inputs of a linear layer, [M, T, I, B]; of the first, which trials share, [M, I, B]
    z          its outputs, [M, T, O, B]
    e          derivative of the loss in z, the error of back-propagation
    Da, De     derivatives of a and e along a direction v of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .backend import Backend, by_trial
from .losses import RowLoss, bend, slope

if TYPE_CHECKING:
    from ..algorithm import Batch

Elementwise = Callable[[Tensor], Tensor]


class Activation(NamedTuple):
    """An element-wise activation. Slope and bend are given as functions of its value.

    So the way back needs a alone, and z is not kept. The second derivative of a in z is the
    product bend(a) * slope(a).
    """

    value: Elementwise  # a(z)
    slope: Elementwise  # a -> a'(z)
    bend: Elementwise  # a -> the derivative of a' in a


class Affine(NamedTuple):
    """The parameters of one linear layer, or a slot for their gradient.

    Both are views into a flat vector [M, T, d].
    """

    weight: Tensor  # [M, T, O, I]
    bias: Tensor | None  # [M, T, O]


class Dense(Backend):
    """Linear layers with element-wise activations between them.

    `layers` are linear layers and activations in turn: linear layer n is layers[2 n].
    """

    ACTIVATIONS: ClassVar[dict[type[nn.Module], Activation]] = {
        nn.ReLU: Activation(torch.relu, lambda a: (a > 0).to(a.dtype), torch.zeros_like),
        nn.Tanh: Activation(torch.tanh, lambda a: 1 - a * a, lambda a: -2 * a),
        nn.Sigmoid: Activation(torch.sigmoid, lambda a: a * (1 - a), lambda a: 1 - 2 * a),
    }

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        chain = sequence(self.module)
        self.layers = [m for m in chain if not isinstance(m, (nn.Flatten, nn.Identity))]
        self._kept: dict[str, Tensor] = {}

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is [Flatten,] Linear, (activation, Linear)*.

        All layers must be distinct, plain and trainable. Samples must be vectors, or be flattened
        first. Identity layers are passed over.
        """
        chain = [m for m in sequence(module) if type(m) is not nn.Identity]
        flat = len(sample) == 1
        if chain and type(chain[0]) is nn.Flatten:
            flat = True
            chain = chain[1:]
        if not flat or len(chain) % 2 == 0 or not are_distinct(chain):
            return False
        linear = all(type(m) is nn.Linear for m in chain[::2])
        between = all(type(m) in cls.ACTIVATIONS for m in chain[1::2])
        return linear and between and is_plain(module)

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs of the last layer, [M, T, classes, B]."""
        inputs, _ = self._forward(x, rows)
        return inputs[-1]

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """The same: nothing here depends on the mode."""
        return self.predict(x, batch.x)

    def _affines(self, x: Tensor) -> list[Affine]:
        """Views of flat vectors x [M, T, d] as the parameters of each linear layer."""
        params = iter(self.layout.unravel(x).values())
        found = []
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight = next(params)
                bias = None if layer.bias is None else next(params)
                found.append(Affine(weight, bias))
        return found

    def _forward(self, x: Tensor, rows: Tensor) -> tuple[list[Tensor], list[Affine]]:
        """The inputs of each linear layer, and the outputs of the last one; and the layers.

        The list of inputs has one entry more than there are linear layers. Its first entry is the
        rows, [M, I, B], as a view.
        """
        affines = self._affines(x)
        todo = iter(affines)
        inputs = [rows.flatten(2).transpose(1, 2)]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                inputs.append(self._apply(next(todo), inputs[-1]))
            else:
                activation = self.ACTIVATIONS[type(layer)]
                inputs[-1] = activation.value(inputs[-1])
        return inputs, affines

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Back-propagation by hand.

        From the last linear layer to the first: the gradient of W is e a^T, that of b the sum of
        e over the rows, and the error one layer down is (W^T e) * act'(z).
        """
        inputs, affines = self._forward(x, batch.x)
        z = inputs.pop()
        y = by_trial(batch.y, z.shape[1])
        share = batch.weight[:, None, None, :]  # of each row in the mean
        rows, e = slope(self.loss, z, y)
        e = e.mul_(share)
        grad = _room(x) if out is None else out
        slots = self._affines(grad)
        for n in reversed(range(len(affines))):
            a = inputs[n]
            self._outer(e, a, slots[n])
            if n:
                e = affines[n].weight.transpose(-2, -1) @ e
                e = e * self._before(n).slope(a)
        return (rows * share.squeeze(2)).sum(-1), grad

    def _before(self, n: int) -> Activation:
        """The activation whose values are the inputs of linear layer n >= 1."""
        return self.ACTIVATIONS[type(self.layers[2 * n - 1])]

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Both passes of back-propagation and, beside them, their derivatives along v.

        This is Pearlmutter's R-operator: the derivative of the gradient at x + t v in t, at
        t = 0. It is exact, and costs a small multiple of a gradient.
        """
        inputs, affines = self._forward(x, batch.x)
        along = self._affines(v)
        pushed = self._pushed(inputs, affines, along)
        z = inputs.pop()
        y = by_trial(batch.y, x.shape[1])
        share = batch.weight[:, None, None, :]
        De = bend(self.loss, z, y, pushed.pop()) * share
        e = slope(self.loss, z, y)[1] * share if len(affines) > 1 else De  # one layer needs no e
        out = _room(x)
        slots = self._affines(out)
        for n in reversed(range(len(affines))):
            a = inputs[n]
            self._outer(De, a, slots[n])
            if n:
                before = self._before(n)
                Da = pushed[n - 1]
                W = affines[n].weight
                # The product rule for the gradient e a^T, then for the error (W^T e) act'(z).
                slots[n].weight.add_(e @ Da.mT)
                De = along[n].weight.mT @ e + W.mT @ De
                e = W.mT @ e
                De = De * before.slope(a) + e * before.bend(a) * Da
                e = e * before.slope(a)
        return out

    def _pushed(
        self,
        inputs: list[Tensor],
        affines: list[Affine],
        along: list[Affine],
    ) -> list[Tensor]:
        """The derivatives along v of all inputs but the first, which has none, and of the outputs.

        `along` holds v in the shape of the layers.
        """
        pushed = [self._apply(along[0], inputs[0])]
        for n in range(1, len(affines)):
            a = inputs[n]
            Da = self._before(n).slope(a) * pushed[-1]
            pushed[-1] = Da
            pushed.append(self._apply(along[n], a).add_(affines[n].weight @ Da))
        return pushed

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """In closed form for one layer, else column by column.

        With one layer the outputs are linear in the parameters, so that the loss's second
        derivative in z is all that is needed.
        """
        if len(self.layers) > 1:
            return super()._hessian(x, batch)
        (a, z), (layer,) = self._forward(x, batch.x)
        y = by_trial(batch.y, z.shape[1])
        share = batch.weight[:, None, None, :]
        outputs = z.shape[2]
        unit = torch.eye(outputs, dtype=z.dtype, device=z.device).unsqueeze(-1)

        def column(o: int) -> Tensor:
            """Column o of the loss's second derivative in z, times the rows' weights."""
            return bend(self.loss, z, y, unit[o].expand_as(z)) * share

        return of_linear(a, column, outputs, layer.bias is not None)

    def _apply(self, layer: Affine, a: Tensor) -> Tensor:
        """W a + b, [M, T, O, B].

        The inputs of the first layer, [M, I, B], are shared by the trials: the weights of all
        trials then stand below each other in one matrix [T O, I] for each client, and one product
        does for all.
        """
        weight, bias = layer
        if a.dim() == 4:
            z = weight @ a
        else:
            M, T, O, I = weight.shape
            whole = self._buffer("weights", weight, M, T * O, I)
            whole.view(weight.shape).copy_(weight)
            z = torch.bmm(whole, a).view(M, T, O, a.shape[-1])
        return z if bias is None else z.add_(bias.unsqueeze(-1))

    def _outer(
        self,
        e: Tensor,
        a: Tensor,
        slot: Affine,
    ) -> None:
        """Write a layer's gradient into the slot: e a^T for the weight, sum e for the bias."""
        weight, bias = slot
        if bias is not None:
            torch.sum(e, -1, out=bias)
        if a.dim() == 4:
            torch.matmul(e, a.transpose(-2, -1), out=weight)
            return
        M, T, O, B = e.shape
        product = self._buffer("gradient", e, M, T * O, a.shape[1])
        torch.bmm(e.view(M, T * O, B), a.transpose(1, 2), out=product)
        weight.copy_(product.view(weight.shape))

    def _buffer(
        self,
        name: str,
        like: Tensor,
        *shape: int,
    ) -> Tensor:
        """A contiguous matrix that is kept between steps.

        Products with slices of the flat vector, which are not contiguous, are a fifth slower.
        Each name has one buffer, which the next call for it overwrites.
        """
        size = prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size or kept.dtype != like.dtype:
            kept = like.new_empty(size)
            self._kept[name] = kept
        return kept[:size].view(shape)


def _room(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape with nothing in it yet."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- which modules are plain chains ----


def is_one_map(module: nn.Module, sample: Sequence[int]) -> bool:
    """Whether the module is a single linear layer with one output, as logistic regression is."""
    if not is_linear(module, sample):
        return False
    return all(m.out_features == 1 for m in sequence(module) if isinstance(m, nn.Linear))


def is_linear(module: nn.Module, sample: Sequence[int]) -> bool:
    """Whether the module is a single linear layer, so that the usual losses are convex in it."""
    if not Dense.fits(module, sample):
        return False
    return sum(isinstance(m, nn.Linear) for m in sequence(module)) == 1


def is_plain(module: nn.Module) -> bool:
    """Whether every parameter is trainable and used once, and no hook is registered.

    Shared weights and hooks are honoured by back ends that call the module itself; those that
    compute its layers on their own would pass them over.
    """
    params = [p for _, p in module.named_parameters(remove_duplicate=False)]
    hooked = any(_has_hooks(m) for m in module.modules())
    return not hooked and are_distinct(params) and all(p.requires_grad for p in params)


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered with the module itself."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def are_distinct(objects: Iterable[object]) -> bool:
    """Whether no object occurs twice, by identity."""
    ids = [id(one) for one in objects]
    return len(set(ids)) == len(ids)


def sequence(module: nn.Module) -> list[nn.Module]:
    """The modules of a plain chain, in order; any other module alone.

    A subclass of Sequential is not taken apart: it may do anything in its forward.
    """
    if type(module) is not nn.Sequential:
        return [module]
    chain = []
    for child in module:
        chain += sequence(child)
    return chain


# ---- the Hessian of one linear layer ----


def of_linear(
    a: Tensor,
    column: Callable[[int], Tensor],
    outputs: int,
    bias: bool,
) -> Tensor:
    """The Hessian [M, T, d, d] of the loss in the parameters of one layer z = W a + b.

    Its inputs are a [M, I, B]. The parameters are the weights [outputs, I], then the bias. The
    Hessian is the sum over rows of the Kronecker products S (x) a a^T, where S [outputs, outputs]
    is the loss's second derivative in z. `column(o)` gives column o of every S, times the row's
    weight, as [M, T, outputs, B]. Only pairs of outputs o <= q are computed, the others are
    mirrored.
    """
    M, I, B = a.shape
    parts = [I, 1] if bias else [I]
    n = sum(parts)
    a = torch.cat([a, a.new_ones(M, n - I, B)], 1)  # the bias is the weight of a constant input
    H = a.new_empty(0)
    for o in range(outputs):
        S = column(o)[:, :, o:, None] / 2
        T, Q = S.shape[1:3]
        scaled = (S * a[:, None, None]).reshape(M, T * Q * n, B)
        G = torch.bmm(scaled, a.mT).view(M, T, Q, n, n)
        if outputs == 1:  # nothing has to be put in order
            return (G + G.mT).squeeze(2)
        if o == 0:
            H = a.new_empty(M, T, outputs * n, outputs * n)
        _place(H, G + G.mT, o, parts)  # symmetric to the bit
    return H


def _place(
    H: Tensor,
    G: Tensor,
    o: int,
    parts: list[int],
) -> None:
    """Write the blocks of output o into H, and their mirror images.

    G [M, T, Q, n, n] holds the blocks of o with itself and with the Q - 1 outputs after it. `parts`
    are the sizes of weight and bias in n.
    """
    outputs = o + G.shape[2]
    sizes = [outputs * i for i in parts]
    halves = zip(torch.split(H, sizes, -2), torch.split(G, parts, -2), strict=True)
    for half, rows in halves:
        quarters = zip(torch.split(half, sizes, -1), torch.split(rows, parts, -1), strict=True)
        for quarter, block in quarters:
            i, j = block.shape[-2:]
            view = quarter.view(*H.shape[:2], outputs, i, outputs, j)
            view[:, :, o, :, o:] = block.transpose(2, 3)
            view[:, :, o:, :, o] = block
