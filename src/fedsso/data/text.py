"""Readers of text: one-hot characters to predict the next one from, and bags of words with their
sentiment."""

from __future__ import annotations

import codecs
import csv
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..errors import InputError, integer
from ..support.intake import limits, read_text
from ..support.intake import lines as packed_lines
from ..support.rng import key
from .pool import Pool

Array = np.ndarray[Any, Any]
MOST = 255  # characters of an alphabet, and words of a tweet: what a byte holds
CHUNK = 4096  # rows counted at a time
PIECE = 1 << 20  # characters looked up at a time
SPEECH = re.compile(r"(?:\A|\n\r?\n)([^\r\n]+):(?=\r?\n|\Z)")
COLUMNS = ["polarity", "id", "date", "query", "user", "text"]
URL = re.compile(r"(?:https?://|www\.)\S+")
USER = re.compile(r"@\w+")
NUMBER = re.compile(r"\b\d+(?:[.,:]\d+)*\b")
WORD = re.compile(r"<(?:url|user|number)>|n't\b|'(?:s|m|d|re|ve|ll)\b|\w+")


def shakespeare(paths: Sequence[Path], *, length: int = 50) -> Pool:
    """Next-character prediction: a row is `length` one-hot characters, its label the character that
    follows.

    The text is cut into consecutive pieces of length + 1 characters, a remainder dropped: no
    character is in two rows, so that none is in a training and a test row. A row's group is who
    speaks at its start.
    """
    (path,) = paths
    text, size = read_text(path), integer("length", length, 1) + 1
    rows = len(text) // size
    if not rows:
        raise InputError(
            f"{path}: has {len(text)} characters, one row takes {size}: use a smaller length"
        )
    alphabet = sorted(set(text))
    if len(alphabet) > MOST:
        raise InputError(
            f"{path}: has {len(alphabet)} distinct characters, need at most {MOST}: replace the "
            f"rare ones in the file"
        )
    _affordable(f"{path}: the rows", rows * length * len(alphabet) + 4 * len(text), "cut the file")
    pieces = _codes(text, alphabet)[: rows * size].reshape(rows, size)
    x = _one_hot(pieces[:, :-1], len(alphabet))
    speakers = _speakers(text, np.arange(rows) * size)
    return Pool(
        x, torch.from_numpy(pieces[:, -1].astype(np.int64)), group=speakers, classes=len(alphabet)
    )


def sentiment140(
    paths: Sequence[Path],
    *,
    length: int = 200,
    buckets: int = 1024,
    vectors: Path | None = None,
    rows: int = 0,
) -> Pool:
    """Tweets as bags of at most `length` words, label 1 where the mood is good; a row's group is
    who wrote it.

    Reads the official files and the same columns as UTF-8 with a header; `rows` > 0 takes a fixed
    sample of them. Without vectors a sample counts its words by hash, in `buckets` places: a linear
    layer on it is an embedding, trained and summed over the words. With vectors, the path of a
    GloVe text file (plain, .gz or .zip), a sample is the mean of its known words' vectors, zero
    where it has none.
    """
    length, buckets = integer("length", length, 1, MOST), integer("buckets", buckets, 1)
    seen: Counter[str] = Counter()
    tweets = _bags(_sample(_opinions(paths, seen), integer("rows", rows, 0)), length)
    if not tweets.labels:
        raise InputError(f"{paths[0]}: has no tweet of polarity 0 or 4: fetch it again")
    notes = [f"{seen['2']} neutral tweets (polarity 2) left out"] if seen["2"] else []
    if vectors:
        x, found = _averaged(tweets, vectors)
        notes.append(found)
    else:
        x = _hashed(tweets, buckets)
    return Pool(
        x,
        torch.tensor(tweets.labels),
        group=np.array(tweets.users, dtype=object),
        notes=tuple(notes),
    )


class Tweet(NamedTuple):
    polarity: str  # "0" bad, "2" neutral, "4" good
    user: str
    text: str


class Bags(NamedTuple):
    """Tweets as word numbers: tweet i has words[codes[j]] for j in start[i]..start[i + 1] - 1."""

    labels: list[int]
    users: list[str]
    words: list[str]  # each distinct word once
    codes: Array  # int32
    start: Array  # int32 [rows + 1]


def _affordable(what: str, size: int, remedy: str) -> None:
    most = limits().samples
    if size > most:
        raise InputError(
            f"{what} take {size} bytes, need at most {most}: {remedy}, or set FEDSSO_MAX_SAMPLES"
        )


def _codes(text: str, alphabet: Sequence[str]) -> Array:
    """The place of each character in the alphabet, uint8."""
    known, codes = np.array(list(map(ord, alphabet)), np.uint32), np.zeros(len(text), np.uint8)
    for a in range(0, len(text), PIECE):
        piece = np.frombuffer(text[a : a + PIECE].encode("utf-32-le"), "<u4")
        codes[a : a + PIECE] = np.searchsorted(known, piece)
    return codes


def _one_hot(codes: Array, characters: int) -> Tensor:
    x = np.zeros((*codes.shape, characters), np.uint8)
    for a in range(0, len(codes), CHUNK):
        np.put_along_axis(x[a : a + CHUNK], codes[a : a + CHUNK, :, None].astype(np.int64), 1, 2)
    return torch.from_numpy(x)


def _speakers(text: str, places: Array) -> Array:
    """Who speaks at each place: a line `NAME:` after a blank one, or at the top, begins a speech."""
    speeches = list(SPEECH.finditer(text))
    names = np.array(["(nobody)", *(speech[1] for speech in speeches)], dtype=object)
    return names[np.searchsorted([speech.start(1) for speech in speeches], places, side="right")]


def _opinions(paths: Iterable[Path], seen: Counter[str]) -> Iterator[Tweet]:
    """The tweets of good or bad mood; `seen` counts all of them by polarity."""
    for path in paths:
        for tweet in _tweets(path):
            seen[tweet.polarity] += 1
            if tweet.polarity != "2":
                yield tweet


def _tweets(path: Path) -> Iterator[Tweet]:
    reader, start, cells = csv.reader(_decoded(path)), 1, list[str]()
    try:
        for cells in reader:
            if cells and not (reader.line_num == 1 and cells == COLUMNS):
                yield _tweet(cells, f"{path}: line {start}")
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}: line {start}: is not CSV ({error}): fetch it again") from None
    if cells:  # the blank line at the end was taken for a part of it
        raise InputError(
            f"{path}: the quotes of the last row are not closed, the file is cut short: fetch it "
            f"again"
        )


def _tweet(cells: Sequence[str], where: str) -> Tweet:
    if len(cells) != len(COLUMNS) or cells[0] not in ("0", "2", "4"):
        raise InputError(
            f"{where}: has {len(cells)} cells, the first {cells[0][:20]!r}; expected "
            f"{len(COLUMNS)}, "
            f"{','.join(COLUMNS)}, with a polarity of 0, 2 or 4: correct the line, or fetch the "
            f"file again"
        )
    return Tweet(cells[0], cells[4], cells[5])


def _decoded(path: Path) -> Iterator[str]:
    """The lines of a file as text: UTF-8 below a header, else latin-1 as the official files are;
    then a blank one."""
    lines = packed_lines(path)
    first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
    encoding = "utf-8" if first.startswith((b"polarity", b'"polarity"')) else "latin-1"
    for n, line in enumerate(chain([first], lines), 1):
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError:
            raise InputError(
                f"{path}: line {n}: is not UTF-8 text: save the file as UTF-8"
            ) from None
    yield "\n"


def _sample(tweets: Iterable[Tweet], rows: int) -> Iterable[Tweet]:
    """That many tweets in their order, every choice equally likely, the same each time; 0: all of
    them."""
    if not rows:
        return tweets
    draw, kept, total = Random(key(0, "sentiment140", "rows")), list[tuple[int, Tweet]](), 0
    for total, tweet in enumerate(tweets, 1):
        place = int(draw.random() * total)
        if total <= rows:
            kept.append((total, tweet))
        elif place < rows:
            kept[place] = total, tweet
    if total < rows:
        raise InputError(
            f"rows must be at most {total}, the tweets there are, got rows={rows}: use 0 for all"
        )
    return [tweet for _, tweet in sorted(kept)]


def _bags(tweets: Iterable[Tweet], length: int) -> Bags:
    labels, users, number = list[int](), list[str](), dict[str, int]()
    codes, start, most, names = array("i"), array("i", [0]), limits(), 0
    for tweet in tweets:
        names += len(tweet.user)
        most.check("text", names, "the tweets", "characters in the names of who wrote them")
        most.check("words", len(number), "the tweets", "distinct words")
        most.check("cells", len(codes), "the tweets", "words")
        labels.append(int(tweet.polarity == "4"))
        users.append(tweet.user)
        codes.extend([number.setdefault(word, len(number)) for word in _words(tweet.text)[:length]])
        start.append(len(codes))
    return Bags(labels, users, list(number), np.array(codes, np.int32), np.array(start, np.int32))


def _words(text: str) -> list[str]:
    """Lower-case words as GloVe's Twitter vectors have them: <url>, <user>, <number>, and don't as
    do n't."""
    text = USER.sub("<user>", URL.sub("<url>", unescape(text).lower()))
    return WORD.findall(NUMBER.sub("<number>", text).replace("n't", " n't"))


def _hashed(tweets: Bags, buckets: int) -> Tensor:
    """How often each tweet has a word of each bucket: uint8 [rows, buckets]."""
    rows = len(tweets.labels)
    _affordable(
        f"{rows} tweets",
        rows * buckets,
        f"use rows={limits().samples // buckets}, or fewer buckets",
    )
    bucket = np.array([zlib.crc32(word.encode()) % buckets for word in tweets.words], np.int64)
    x = np.zeros((rows, buckets), np.uint8)
    for a in range(0, rows, CHUNK):
        start = tweets.start[a : a + CHUNK + 1]
        row = np.repeat(np.arange(len(start) - 1), np.diff(start))
        place = row * buckets + bucket[tweets.codes[start[0] : start[-1]]]
        np.add.at(x[a : a + CHUNK].reshape(-1), place, np.uint8(1))
    return torch.from_numpy(x)


def _averaged(tweets: Bags, path: Path) -> tuple[Tensor, str]:
    """The mean vector of each tweet's known words, float32 [rows, dim], and a note on how many are
    known."""
    number, vectors = _vectors(path, tweets.words)
    rows, dim = len(tweets.labels), vectors.shape[1]
    _affordable(
        f"{rows} tweets",
        4 * rows * dim,
        f"use rows={limits().samples // (4 * dim)}, or shorter vectors",
    )
    known = number[tweets.codes]
    codes, weight, start = (torch.from_numpy(a) for a in (known, vectors, tweets.start[:-1]))
    x = embedding_bag(codes, weight, start, mode="mean", padding_idx=0)
    note = f"{len(vectors) - 1} of {len(tweets.words)} distinct words are in {path.name}"
    return x, f"{note}, {(known > 0).mean():.1%} of all words"


def _vectors(path: Path, words: Sequence[str]) -> tuple[Array, Array]:
    """The number of each word's vector, int32, and the vectors, float32 [1 + known, dim]; number 0
    is unknown."""
    wanted = {word.encode(): i for i, word in enumerate(words)}
    number, vectors = np.zeros(len(words), np.int32), list[Array]()
    for n, word, cells in _entries(path):
        i = wanted.pop(word, None)
        if i is not None:
            vectors.append(_vector(cells, f"{path}: line {n}"))
            number[i] = len(vectors)
    if not vectors:
        raise InputError(
            f"{path}: has none of the {len(words)} words of the tweets: use a GloVe text file"
        )
    return number, np.stack([np.zeros_like(vectors[0]), *vectors])


def _entries(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Line number, word and the text of its vector; all vectors have the length of the first."""
    dim = 0
    for n, line in enumerate(packed_lines(path), 1):
        word, _, cells = line.rstrip(b"\r\n").partition(b" ")
        count = cells.count(b" ") + 1 if cells else 0
        dim = dim or count
        if not dim or count != dim:
            raise InputError(
                f"{path}: line {n}: has {count} numbers after the word, expected "
                f"{dim or 'one or more'}: "
                "use a GloVe text file, or fetch it again"
            )
        yield n, word, cells


def _vector(cells: bytes, where: str) -> Array:
    try:
        vector = np.array([float(cell) for cell in cells.split(b" ")])
    except ValueError as error:
        raise InputError(
            f"{where}: {error}; expected a word and its numbers: fetch the file again"
        ) from None
    if not (np.abs(vector) <= np.finfo(np.float32).max).all():
        raise InputError(f"{where}: has a number that is no finite float32: fetch the file again")
    return vector.astype(np.float32)
