"""Readers of text sets: a play, of which the next character is to be predicted, and tweets.

Both return samples of a fixed shape. A piece of a play is a row of one-hot characters. A tweet is
either a count of its hashed words, or the mean of the vectors of its words.

Tweets are many, so they are read line by line, and their words are kept as numbers. The size of
the samples is known before they are made: `_check_affordable` refuses what would not fit into
memory.
"""

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

from ..errors import InputError
from ..support.intake import limits, read_text
from ..support.intake import lines as packed_lines
from ..support.rng import key
from .options import BUCKETS, BYTE, PIECE_LENGTH, SAMPLED_ROWS, TWEET_LENGTH, VECTORS
from .pool import Pool

Array = np.ndarray[Any, Any]

CHUNK = 4096
"""How many rows are counted at a time."""
PIECE = 1 << 20
"""How many characters are looked up at a time."""
SPEECH = re.compile(r"(?:\A|\n\r?\n)([^\r\n]+):(?=\r?\n|\Z)")
"""How a speech in a play begins: with a line `NAME:` after a blank line, or at the top."""
COLUMNS = ["polarity", "id", "date", "query", "user", "text"]
"""The columns of Sentiment140."""
FLOAT32 = np.finfo(np.float32).max

# What is a word of a tweet, in the sense of the vectors that GloVe has for Twitter.
URL = re.compile(r"(?:https?://|www\.)\S+")
USER = re.compile(r"@\w+")
NUMBER = re.compile(r"\b\d+(?:[.,:]\d+)*\b")
WORD = re.compile(r"<(?:url|user|number)>|n't\b|'(?:s|m|d|re|ve|ll)\b|\w+")


# ---- a play ----


def shakespeare(paths: Sequence[Path], *, length: int = PIECE_LENGTH.default) -> Pool:
    """Read a play, to predict the next character.

    The text is cut into consecutive pieces of length + 1 characters, and a remainder is dropped.
    So no character is in two rows, and nothing leaks from training to test rows.

    Args:
        paths: One file, in UTF-8.
        length: How many characters a model sees.

    Returns:
        A sample is `length` characters, one-hot: uint8 [length, characters of the alphabet]. Its
        label is the character that follows. A row's group is who speaks at its start.

    Raises:
        InputError: The file cannot be read, is shorter than one piece, has more than 255 different
            characters, or would take too much memory.
    """
    (path,) = paths
    text = read_text(path)
    size = PIECE_LENGTH.check(length) + 1
    rows = len(text) // size
    if not rows:
        raise InputError(
            f"{path}: has {len(text)} characters, one row takes {size}: use a smaller length"
        )
    alphabet = sorted(set(text))
    count = len(alphabet)
    # A character's code is kept in one byte.
    if count > BYTE:
        raise InputError(
            f"{path}: has {count} distinct characters, need at most {BYTE}: replace the rare ones "
            f"in the file"
        )
    samples = rows * length * count
    needed = samples + 4 * len(text)
    _check_affordable(f"{path}: the rows", needed, "cut the file")
    codes = _codes(text, alphabet)
    used = rows * size
    pieces = codes[:used].reshape(rows, size)
    following = pieces[:, -1].astype(np.int64)
    starts = np.arange(rows) * size
    return Pool(
        _one_hot(pieces[:, :-1], count),
        torch.from_numpy(following),
        group=_speakers(text, starts),
        classes=count,
    )


def _codes(text: str, alphabet: Sequence[str]) -> Array:
    """The place of each character in the alphabet, uint8 [characters of the text].

    UTF-32 gives every character four bytes, so numpy can look them up. A piece is encoded at a
    time, because the whole text would take four times its memory.
    """
    numbers = [ord(character) for character in alphabet]
    known = np.array(numbers, np.uint32)
    codes = np.zeros(len(text), np.uint8)
    for start in range(0, len(text), PIECE):
        end = start + PIECE
        encoded = text[start:end].encode("utf-32-le")
        piece = np.frombuffer(encoded, "<u4")
        codes[start:end] = np.searchsorted(known, piece)
    return codes


def _one_hot(codes: Array, characters: int) -> Tensor:
    """Codes [rows, length] as uint8 [rows, length, characters]: 1 at the code, 0 elsewhere.

    The samples are filled in chunks, because the places take eight times as much as the codes.
    """
    rows, length = codes.shape
    x = np.zeros((rows, length, characters), np.uint8)
    for start in range(0, len(codes), CHUNK):
        end = start + CHUNK
        places = codes[start:end, :, None]
        wide = places.astype(np.int64)
        np.put_along_axis(x[start:end], wide, 1, 2)
    return torch.from_numpy(x)


def _speakers(text: str, places: Array) -> Array:
    """Who speaks at each place of the text. Before the first speech it is "(nobody)".

    `places` are numbers of characters, from 0. Returns a name for each.
    """
    names = ["(nobody)"]
    starts = []
    for speech in SPEECH.finditer(text):
        names.append(speech[1])
        starts.append(speech.start(1))
    # How many speeches begin at or before the place: 0 is nobody, 1 the first speaker.
    number = np.searchsorted(starts, places, side="right")
    return np.array(names, dtype=object)[number]


# ---- tweets ----


class Tweet(NamedTuple):
    """A tweet of Sentiment140."""

    polarity: str
    """"0" for a bad mood, "2" for a neutral one, "4" for a good one."""
    user: str
    text: str


class Bags(NamedTuple):
    """Tweets as numbers of words: tweet i has the words words[codes[start[i]:start[i + 1]]]."""

    labels: list[int]
    """1 for a good mood, 0 for a bad one."""
    users: list[str]
    words: list[str]
    """Each distinct word once."""
    codes: Array
    """The numbers of the words of all tweets, int32."""
    start: Array
    """Where each tweet begins in `codes`, int32 [tweets + 1]."""


def sentiment140(
    paths: Sequence[Path],
    *,
    length: int = TWEET_LENGTH.default,
    buckets: int = BUCKETS.default,
    vectors: Path | None = VECTORS.default,
    rows: int = SAMPLED_ROWS.default,
) -> Pool:
    """Read tweets of a good (label 1) or bad (label 0) mood. A row's group is who wrote it.

    Args:
        paths: The official files, or files with the same columns in UTF-8 with a header.
        length: How many words of a tweet count.
        buckets: How many places the words of a tweet are counted in, by their hash. A linear layer
            on such counts is an embedding, summed over the words, that is trained.
        vectors: The path of a GloVe text file (plain, .gz or .zip). Then a sample is the mean of
            the vectors of its known words, or zero if it has none.
        rows: How many tweets to draw, always the same ones. 0 takes all of them.

    Returns:
        Samples are uint8 [buckets], or float32 with the length of the vectors. Notes count the
        neutral tweets, which are left out, and the words that have a vector.

    Raises:
        InputError: A file cannot be read, has no tweet of a good or bad mood, or fewer than `rows`
            of them, or the samples would take too much memory.
    """
    length = TWEET_LENGTH.check(length)
    buckets = BUCKETS.check(buckets)
    rows = SAMPLED_ROWS.check(rows)
    seen: Counter[str] = Counter()
    opinions = _opinions(paths, seen)
    tweets = _bags(_sample(opinions, rows), length)
    if not tweets.labels:
        raise InputError(f"{paths[0]}: has no tweet of polarity 0 or 4: download it again")
    notes = []
    if seen["2"]:
        notes.append(f"{seen['2']} neutral tweets (polarity 2) left out")
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


def _opinions(
    paths: Iterable[Path],
    seen: Counter[str],
) -> Iterator[Tweet]:
    """The tweets of a good or bad mood, file after file. `seen` counts all tweets by polarity.

    The counts are complete only when all tweets have been taken.
    """
    for path in paths:
        for tweet in _tweets(path):
            seen[tweet.polarity] += 1
            if tweet.polarity != "2":
                yield tweet


def _tweets(path: Path) -> Iterator[Tweet]:
    """The tweets of one file. A header is passed over.

    The last line that `_decoded` gives is blank. If the quotes of the last row are not closed, the
    blank line becomes a part of that row, which shows that the file was cut short.
    """
    reader = csv.reader(_decoded(path))
    start = 1  # the line where the next row begins
    cells: list[str] = []
    try:
        for cells in reader:
            is_header = reader.line_num == 1 and cells == COLUMNS
            if cells and not is_header:
                yield _tweet(cells, f"{path}: line {start}")
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}: line {start}: is not CSV ({error}): download it again") from None
    if cells:
        raise InputError(
            f"{path}: the quotes of the last row are not closed, the file is cut short: "
            "download it "
            f"again"
        )


def _tweet(cells: Sequence[str], where: str) -> Tweet:
    """A tweet from the cells of its row. InputError, with `where`, if it is not one."""
    polarity = cells[0]
    count = len(cells)
    wanted = len(COLUMNS)
    if count != wanted or polarity not in ("0", "2", "4"):
        names = ",".join(COLUMNS)
        start = polarity[:20]
        raise InputError(
            f"{where}: has {count} cells, the first {start!r}; expected {wanted}, {names}, with a "
            f"polarity of 0, 2 or 4: correct the line, or download the file again"
        )
    return Tweet(polarity, cells[4], cells[5])


def _decoded(path: Path) -> Iterator[str]:
    """The lines of a file as text, and a blank line at the end.

    Below a header it is UTF-8. The official files have no header and are latin-1.
    """
    lines = packed_lines(path)
    first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
    has_header = first.startswith((b"polarity", b'"polarity"'))
    encoding = "utf-8" if has_header else "latin-1"
    for number, line in enumerate(chain([first], lines), 1):
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError:
            raise InputError(
                f"{path}: line {number}: is not UTF-8 text: save the file as UTF-8"
            ) from None
    yield "\n"


def _sample(tweets: Iterable[Tweet], rows: int) -> Iterable[Tweet]:
    """Draw `rows` tweets, and keep their order. 0 takes all of them.

    Every choice of tweets is equally likely, and it is the same each time. The tweets are read
    once, without knowing how many there are (reservoir sampling): tweet number n takes a random
    place of the sample with probability rows / n. InputError if there are fewer than `rows`.
    """
    if not rows:
        return tweets
    draw = Random(key(0, "sentiment140", "rows"))
    kept: list[tuple[int, Tweet]] = []
    total = 0
    for total, tweet in enumerate(tweets, 1):
        place = int(draw.random() * total)
        if total <= rows:
            kept.append((total, tweet))
        elif place < rows:
            kept[place] = (total, tweet)
    if total < rows:
        raise InputError(
            f"rows must be at most {total}, the tweets there are, got rows={rows}: use 0 for all"
        )
    return [tweet for _, tweet in sorted(kept)]


def _bags(tweets: Iterable[Tweet], length: int) -> Bags:
    """Number the words of the tweets in the order of their first appearance.

    A number takes four bytes, however long the word is. The first `length` words of a tweet count.
    Limits are checked while the tweets are read, before they fill the memory.
    """
    labels: list[int] = []
    users: list[str] = []
    number_of: dict[str, int] = {}
    codes = array("i")
    start = array("i", [0])
    names = 0  # characters in the names of the users
    bound = limits()
    for tweet in tweets:
        names += len(tweet.user)
        bound.check("text", names, "the tweets", "characters in the names of who wrote them")
        bound.check("words", len(number_of), "the tweets", "distinct words")
        bound.check("cells", len(codes), "the tweets", "words")
        is_good = tweet.polarity == "4"
        labels.append(int(is_good))
        users.append(tweet.user)
        for word in _words(tweet.text)[:length]:
            code = number_of.setdefault(word, len(number_of))
            codes.append(code)
        start.append(len(codes))
    return Bags(
        labels,
        users,
        list(number_of),
        np.array(codes, np.int32),
        np.array(start, np.int32),
    )


def _words(text: str) -> list[str]:
    """The words of a tweet in lower case, as GloVe's Twitter vectors have them.

    Links, users and numbers become <url>, <user> and <number>, and "don't" becomes "do", "n't".

    >>> _words("@bob I don't like 2 of http://a.b")
    ['<user>', 'i', 'do', "n't", 'like', '<number>', 'of', '<url>']
    """
    text = unescape(text).lower()
    text = URL.sub("<url>", text)
    text = USER.sub("<user>", text)
    text = NUMBER.sub("<number>", text)
    text = text.replace("n't", " n't")
    return WORD.findall(text)


# ---- tweets as counts of hashed words ----


def _hashed(tweets: Bags, buckets: int) -> Tensor:
    """How often each tweet has a word of each bucket: uint8 [tweets, buckets].

    The bucket of a word is its CRC-32 modulo `buckets`, which is the same on every machine.
    Tweets are counted in chunks, so that the numbers of their places do not fill the memory. A
    count fits into one byte, because at most 255 words of a tweet are read.
    """
    rows = len(tweets.labels)
    affordable = limits().samples // buckets
    remedy = f"use rows={affordable}, or fewer buckets"
    _check_affordable(f"{rows} tweets", rows * buckets, remedy)
    hashes = []
    for word in tweets.words:
        hashes.append(zlib.crc32(word.encode()))
    bucket_of_word = np.array(hashes, np.int64) % buckets
    x = np.zeros((rows, buckets), np.uint8)
    for first in range(0, rows, CHUNK):
        last = first + CHUNK
        counts = x[first:last]
        start = tweets.start[first : last + 1]
        begin = start[0]
        end = start[-1]
        words = tweets.codes[begin:end]
        rows_here = np.arange(len(counts))
        row_of_word = np.repeat(rows_here, np.diff(start))
        bucket = bucket_of_word[words]
        place = row_of_word * buckets + bucket
        flat = counts.reshape(-1)
        # Unlike `flat[place] += 1`, it counts a place as often as it occurs.
        np.add.at(flat, place, np.uint8(1))
    return torch.from_numpy(x)


# ---- tweets as mean vectors ----


def _averaged(tweets: Bags, path: Path) -> tuple[Tensor, str]:
    """The mean vector of each tweet's known words, float32 [tweets, dim], and a note.

    The note tells how many words have a vector. InputError if no word has one.
    """
    number_of_word, vectors = _vectors(path, tweets.words)
    rows = len(tweets.labels)
    dim = vectors.shape[1]
    affordable = limits().samples // (4 * dim)
    remedy = f"use rows={affordable}, or shorter vectors"
    _check_affordable(f"{rows} tweets", 4 * rows * dim, remedy)
    numbers = number_of_word[tweets.codes]
    # The padding is left out of the mean: unknown words do not count, and without any known word
    # the mean is zero.
    x = embedding_bag(
        torch.from_numpy(numbers),
        torch.from_numpy(vectors),
        torch.from_numpy(tweets.start[:-1]),
        mode="mean",
        padding_idx=0,
    )
    known = (numbers > 0).mean()
    with_vector = len(vectors) - 1
    distinct = f"{with_vector} of {len(tweets.words)} distinct words"
    note = f"{distinct} are in {path.name}, {known:.1%} of all words"
    return x, note


def _vectors(
    path: Path,
    words: Sequence[str],
) -> tuple[Array, Array]:
    """The vectors of the words that a GloVe file knows.

    The file may have millions of words, so only the vectors of `words` are kept. If it has a word
    twice, the first vector counts.

    Returns:
        The number of each word's vector, int32 [words], and the vectors, float32 [1 + known, dim].
        Number 0 is for unknown words, and its vector is zero.
    """
    wanted = {}
    for place, word in enumerate(words):
        wanted[word.encode()] = place
    numbers = np.zeros(len(words), np.int32)
    vectors: list[Array] = []
    for line, found, cells in _entries(path):
        known = wanted.pop(found, None)
        if known is None:
            continue
        vector = _vector(cells, f"{path}: line {line}")
        vectors.append(vector)
        numbers[known] = len(vectors)
    if not vectors:
        raise InputError(
            f"{path}: has none of the {len(words)} words of the tweets: use a GloVe text file"
        )
    zero = np.zeros_like(vectors[0])
    return numbers, np.stack([zero, *vectors])


def _entries(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """The lines of a GloVe file: line number, word, and the text of its vector.

    All vectors must have the length of the first one. The numbers are not read here, because most
    words are not wanted.
    """
    dim = 0
    for number, line in enumerate(packed_lines(path), 1):
        word, _, cells = line.rstrip(b"\r\n").partition(b" ")
        count = cells.count(b" ") + 1 if cells else 0
        dim = dim or count
        if not dim or count != dim:
            expected = dim or "one or more"
            raise InputError(
                f"{path}: line {number}: has {count} numbers after the word, expected {expected}: "
                "use a GloVe text file, or download it again"
            )
        yield number, word, cells


def _vector(cells: bytes, where: str) -> Array:
    """A vector from its text, float32 [dim].

    Raises InputError if a cell is not a number, or too large for float32.
    """
    try:
        numbers = [float(cell) for cell in cells.split(b" ")]
    except ValueError as error:
        raise InputError(
            f"{where}: {error}; expected a word and its numbers: download the file again"
        ) from None
    vector = np.array(numbers)
    if not (np.abs(vector) <= FLOAT32).all():
        raise InputError(
            f"{where}: has a number that is not a finite float32: download the file again"
        )
    return vector.astype(np.float32)


# ---- both ----


def _check_affordable(what: str, size: int, remedy: str) -> None:
    """Raise InputError if samples would take more bytes than the limit `samples` allows.

    Args:
        what: What takes the memory, at the beginning of the message.
        size: How many bytes.
        remedy: What the user can do about it, beside raising the limit.
    """
    most = limits().samples
    if size > most:
        raise InputError(
            f"{what} take {size} bytes, need at most {most}: {remedy}, or set FEDSSO_MAX_SAMPLES"
        )
