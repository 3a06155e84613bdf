"""What a page is made of: curves, notes, settings to reproduce, and who holds which labels.

The records here are plain data, without HTML. Texts in them are shown as they are: a name such as
"<b>" appears on the page as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tables import Curve


class Entry(NamedTuple):
    """A curve, and where it belongs on the page.

    Every algorithm has a map of its grid for each `origin`. `hyper` places the curve on it: it has
    the hyper-parameters and whatever else may tell two settings apart. If some entries of an origin
    lead, its other entries are background: they are on the maps, but in no card, and their curves
    are drawn only on demand.

    Curves whose `data`, the name of the federation, differs are not compared. `by_client` asks the
    models of the setting how well they serve each client. It is called for curves that the page
    shows at first, and may raise InputError. It is None where there are no models or no data.
    """

    curve: Curve
    hyper: Mapping[str, Any] = {}
    lead: bool = False
    origin: str = ""
    data: str = ""
    by_client: Callable[[], Served] | None = None


class Served(NamedTuple):
    """How well the models of one setting serve each client.

    `values` has the mean over the seeds of the clients' test accuracies or, where there are none,
    of their test losses, NaN for a client without test rows. `metric` says which of the two.
    """

    clients: Sequence[str]
    train_rows: Sequence[int]
    test_rows: Sequence[int]
    metric: str
    values: Sequence[float]


class Recipe(NamedTuple):
    """Settings to reproduce, and the command that takes them from `file`, where there is one.

    With a command, the page tells the reader to save `text` under the name `file` and to call it.
    Without one, `why` may say why there is none.
    """

    title: str
    text: str
    command: str = ""
    file: str = "spec.toml"
    why: str = ""


class Holding(NamedTuple):
    """How many rows of each label every client holds; `counts` has the shape [clients, labels].

    Training and test rows are counted together. `clients` are the names of the clients, `labels`
    those of the labels; without any, a label is called by its number.
    """

    title: str
    clients: Sequence[str]
    counts: NDArray[Any]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Content:
    """What a page is made of.

    `text` is an introduction, in which blank lines part paragraphs. `targets` are the accuracies of
    the table; None chooses four that suit. The best setting is the one with the fewest rounds to
    `goal`. Infinity stands for the best accuracy at the end, and None for a target that suits.
    """

    entries: Sequence[Entry]
    title: str = ""
    text: str = ""
    targets: Sequence[float] | None = None
    notes: Sequence[str] = ()
    holdings: Sequence[Holding] = ()
    recipes: Sequence[Recipe] = ()
    goal: float | None = None

    @property
    def curves(self) -> list[Curve]:
        """All curves in order."""
        return [entry.curve for entry in self.entries]


def check_targets(targets: Sequence[float]) -> None:
    """Refuse a target that no accuracy can reach.

    Raises:
        InputError: A target is not above 0, or is above 1, such as 90 where per cent were meant.
    """
    for target in targets:
        if not 0 < target <= 1:
            raise InputError(
                f"a target is an accuracy above 0 and at most 1, such as 0.9; got {target:g}"
            )
