"""A recurrent network of characters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .shapes import text


def lstm(
    sample: Sequence[int],
    outputs: int,
) -> nn.Module:
    """Predicts the next character of a text, with two LSTM layers of 256 units.

    Samples are one-hot characters [window, alphabet]. With an alphabet of 65, d = 815 945.
    """
    _, alphabet = text(sample, "lstm")
    return CharacterLSTM(alphabet, outputs)


class CharacterLSTM(nn.Module):
    """One-hot characters [rows, T, alphabet] to logits of the character that follows them.

    Every character is first mapped to 8 numbers, as by McMahan et al., "Communication-Efficient
    Learning of Deep Networks from Decentralized Data".
    """

    def __init__(
        self,
        alphabet: int,
        outputs: int,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(alphabet, 8, bias=False)
        self.recurrent = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [rows, outputs], from the state after the last character."""
        states, _ = self.recurrent(self.embed(x))
        out: Tensor = self.head(states[:, -1])
        return out
