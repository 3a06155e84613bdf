"""Readers of text: rows that share no character, speakers, bags of words, word vectors, damaged
files."""

from __future__ import annotations

import csv
import gzip
import io
import os
import time
import tracemalloc
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

import fedsso.data.text as module
from fedsso.data.pool import Pool
from fedsso.data.text import sentiment140, shakespeare
from fedsso.errors import InputError

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)

PLAY = "ANNA:\nHow now?\n\nSecond Lord:\nWell:\nquite well.\n\nANNA:\nGood.\n"
TWEETS = [
    ("0", "bob", "I can't find it, @amy"),
    ("4", "amy", "Great GREAT day! see http://t.co/x?y=1"),
    ("2", "ann", "the sky"),
    ("4", "bob", "top 10 &quot;days&quot; it's 2day"),
]
WORDS = [
    ["i", "ca", "n't", "find", "it", "<user>"],
    ["great", "great", "day", "see", "<url>"],
    ["top", "<number>", "days", "it", "'s", "2day"],
]
GLOVE = "great 1 2 -3\nday 0.5 0 1e-1\nnowhere 9 9 9\n<user> -1 -1 -1\n"


def play(folder: Path, text: str = PLAY, **options: Any) -> Pool:
    path = folder / "play.txt"
    path.write_bytes(text.encode())
    return shakespeare([path], **options)


def official(path: Path, tweets: Sequence[tuple[str, str, str]] = TWEETS) -> Path:
    """As the official files are: latin-1, no header, every cell quoted."""
    with path.open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows(
            [label, i, "Mon Apr 06", "NO_QUERY", user, text]
            for i, (label, user, text) in enumerate(tweets)
        )
    return path


def headed(path: Path, tweets: Sequence[tuple[str, str, str]] = TWEETS) -> Path:
    """UTF-8 below a header, quoted where needed."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["polarity", "id", "date", "query", "user", "text"])
        writer.writerows(
            [label, i, "Mon Apr 06", "NO_QUERY", user, text]
            for i, (label, user, text) in enumerate(tweets)
        )
    return path


def zipped(path: Path, **members: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(f"{name}.txt", text)
    return path


def alike(a: Pool, b: Pool) -> bool:
    assert a.group is not None
    return (
        torch.equal(a.x, b.x)
        and torch.equal(a.y, b.y)
        and np.array_equal(a.group, b.group)
        and a.notes == b.notes
    )


def decoded(pool: Pool, alphabet: Sequence[str]) -> list[str]:
    return [
        "".join(alphabet[c] for c in [*row.argmax(1).tolist(), int(label)])
        for row, label in zip(pool.x, pool.y, strict=True)
    ]


def test_rows_are_the_text_cut_into_consecutive_pieces(tmp_path: Path) -> None:
    pool, alphabet = play(tmp_path, length=6), sorted(set(PLAY))
    assert (pool.x.shape, pool.x.dtype, pool.y.dtype) == (
        (8, 6, len(alphabet)),
        torch.uint8,
        torch.int64,
    )
    assert (pool.x.sum(2) == 1).all()
    assert "".join(decoded(pool, alphabet)) == PLAY[:56]
    assert len(PLAY) == 60  # 4 characters make no row


def test_a_row_belongs_to_who_speaks_at_its_start(tmp_path: Path) -> None:
    pool = play(tmp_path, length=1)
    starts = {name: PLAY.index(f"{name}:\n") for name in ("ANNA", "Second Lord")}
    again = PLAY.rindex("ANNA:")
    speaker = [
        "Second Lord" if starts["Second Lord"] <= 2 * i < again else "ANNA" for i in range(30)
    ]
    assert pool.group is not None
    assert (
        pool.group.tolist() == speaker
    )  # the line "Well:" is no name: the line above it is not blank
    windows = play(tmp_path, PLAY.replace("\n", "\r\n"), length=1)
    assert windows.group is not None
    assert set(windows.group) == set(speaker)
    preface = play(tmp_path, "a play\n\n" + PLAY, length=7)
    assert preface.group is not None
    assert preface.group.tolist()[:2] == ["(nobody)", "ANNA"]


def test_characters_may_be_any_unicode_and_come_in_sorted_order(tmp_path: Path) -> None:
    pool = play(tmp_path, "é😀aé😀a", length=2)
    assert decoded(pool, ["a", "é", "😀"]) == ["é😀a", "é😀a"]


def test_a_text_that_makes_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"play\.txt: .*50 characters.*takes 51.*smaller length"):
        play(tmp_path, "a" * 50)
    assert len(play(tmp_path, "a" * 51).x) == 1
    with pytest.raises(InputError, match=r"length.*integer >= 1.*length=0"):
        play(tmp_path, length=0)
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 256)))
    with pytest.raises(InputError, match=r"play\.txt: .*256 distinct characters.*at most 255"):
        play(tmp_path, many)
    assert play(tmp_path, many[1:]).x.shape == (5, 50, 255)
    (tmp_path / "play.txt").write_bytes(b"one\ntwo \xff\n" * 9)
    with pytest.raises(InputError, match=r"play\.txt: line 2 is not UTF-8 text"):
        shakespeare([tmp_path / "play.txt"])
    with pytest.raises(InputError, match=r"cannot read .*none\.txt: No such file"):
        shakespeare([tmp_path / "none.txt"])


def test_samples_beyond_the_memory_are_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSO_MAX_SAMPLES", "99")
    with pytest.raises(InputError, match=r"play\.txt: .*500 bytes.*at most 99.*cut the file"):
        play(tmp_path, "ab" * 50, length=1)
    path = official(tmp_path / "t.csv")
    with pytest.raises(InputError, match=r"102 bytes.*at most 99.*use rows=2, or fewer buckets"):
        sentiment140([path], buckets=34)
    assert len(sentiment140([path], buckets=34, rows=2).x) == 2
    vectors = tmp_path / "v.txt"
    vectors.write_text("great" + " 1" * 10)
    with pytest.raises(
        InputError, match=r"3 tweets take 120 bytes.*use rows=2, or shorter vectors"
    ):
        sentiment140([path], vectors=vectors)


def expected(buckets: int) -> torch.Tensor:
    x = torch.zeros(len(WORDS), buckets, dtype=torch.uint8)
    for row, words in enumerate(WORDS):
        for word in words:
            x[row, crc32(word.encode()) % buckets] += 1
    return x


@pytest.mark.parametrize("write", [official, headed])
def test_a_tweet_is_the_counts_of_its_words(write: Any, tmp_path: Path) -> None:
    pool = sentiment140([write(tmp_path / "t.csv")])
    assert (pool.x.dtype, pool.y.dtype, pool.affine) == (torch.uint8, torch.int64, (1.0, 0.0))
    assert torch.equal(pool.x, expected(1024))
    assert pool.y.tolist() == [0, 1, 1]
    assert pool.group is not None
    assert pool.group.tolist() == ["bob", "amy", "bob"]
    assert pool.notes == ("1 neutral tweets (polarity 2) left out",)


def test_words_may_share_a_bucket_and_the_rest_of_a_long_tweet_is_left_out(tmp_path: Path) -> None:
    path = official(tmp_path / "t.csv")
    assert torch.equal(
        sentiment140([path], buckets=1).x, torch.tensor([[6], [5], [6]], dtype=torch.uint8)
    )
    assert sentiment140([path], buckets=1, length=5).x.flatten().tolist() == [5, 5, 5]
    long = official(tmp_path / "long.csv", [("0", "u", "no " * 300)])
    assert int(sentiment140([long], length=255).x.max()) == 255
    with pytest.raises(InputError, match="length must be at most 255, got length=256"):
        sentiment140([long], length=256)


def test_more_tweets_than_are_counted_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = official(tmp_path / "t.csv", [TWEETS[i % 2] for i in range(7)] + [("4", "u", "...")])
    whole = sentiment140([path]).x
    assert whole[-1].sum() == 0
    monkeypatch.setattr(module, "CHUNK", 3)
    assert torch.equal(sentiment140([path]).x, whole)


def test_the_hash_is_the_same_on_every_machine(tmp_path: Path) -> None:
    row = sentiment140([official(tmp_path / "t.csv", [("4", "u", "great schön")])]).x[0]
    assert row.nonzero().flatten().tolist() == [453, 607]


def test_the_first_line_tells_the_encoding(tmp_path: Path) -> None:
    tweets = [("0", "zoë", "schön naïve"), ("4", "zoë", 'say "ja",\nnow')]
    ours, theirs = headed(tmp_path / "ours.csv", tweets), official(tmp_path / "theirs.csv", tweets)
    pool = sentiment140([ours])
    assert alike(pool, sentiment140([theirs]))
    assert pool.group is not None
    assert set(pool.group) == {"zoë"}
    assert int(pool.x[1].sum()) == 3
    ours.write_bytes(b"\xef\xbb\xbf" + ours.read_bytes())
    assert alike(pool, sentiment140([ours]))


def test_compressed_files_are_told_by_content(tmp_path: Path) -> None:
    plain = official(tmp_path / "t.csv")
    pool = sentiment140([plain])
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert alike(pool, sentiment140([packed]))
    assert alike(pool, sentiment140([zipped(tmp_path / "t.zip", tweets=plain.read_text())]))


def test_several_files_are_pooled_in_order(tmp_path: Path) -> None:
    first, second = official(tmp_path / "a.csv", TWEETS[:1]), headed(tmp_path / "b.csv", TWEETS[1:])
    assert alike(sentiment140([first, second]), sentiment140([official(tmp_path / "t.csv")]))


def test_a_sample_is_fixed_in_order_and_fair(tmp_path: Path) -> None:
    tweets = [("0" if i < 300 else "4", f"u{i}", "hm") for i in range(600)]
    path = official(tmp_path / "t.csv", tweets)
    pool = sentiment140([path], rows=200, buckets=4)
    assert alike(pool, sentiment140([path], rows=200, buckets=4))
    assert pool.group is not None
    numbers = [int(user[1:]) for user in pool.group]
    assert numbers == sorted(set(numbers))
    assert 75 <= int(pool.y.sum()) <= 125  # sorted by label in the file
    assert alike(sentiment140([path], rows=600, buckets=4), sentiment140([path], buckets=4))
    with pytest.raises(
        InputError,
        match=r"at most 600.*got rows=601.*use 0 for all",
    ):
        sentiment140([path], rows=601)
    with pytest.raises(InputError, match=r"rows.*integer >= 0.*rows=-1"):
        sentiment140([path], rows=-1)


def test_neutral_tweets_are_never_sampled(tmp_path: Path) -> None:
    path = official(tmp_path / "t.csv", [("2", "u", "hm")] * 50 + TWEETS)
    assert sentiment140([path], rows=3).notes == ("51 neutral tweets (polarity 2) left out",)


def test_with_vectors_a_tweet_is_the_mean_of_its_known_words(tmp_path: Path) -> None:
    path, plain = official(tmp_path / "t.csv"), tmp_path / "glove.txt"
    plain.write_text(GLOVE)
    pool = sentiment140([path], vectors=plain)
    assert pool.x.dtype == torch.float32
    wanted = torch.tensor([[-1.0, -1.0, -1.0], [2.5 / 3, 4 / 3, -5.9 / 3], [0.0, 0.0, 0.0]])
    assert torch.allclose(pool.x, wanted)
    assert pool.notes[1] == "3 of 15 distinct words are in glove.txt, 23.5% of all words"
    assert alike(pool, sentiment140([path], vectors=plain, buckets=7))
    packed = tmp_path / "folder" / "glove.txt"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(GLOVE.encode()))
    assert alike(pool, sentiment140([path], vectors=packed))
    zipped(packed, glove=GLOVE)
    assert alike(pool, sentiment140([path], vectors=packed))


def test_only_the_words_that_occur_are_kept_in_memory(tmp_path: Path) -> None:
    path, vectors = official(tmp_path / "t.csv"), tmp_path / "glove.txt"
    vectors.write_text(
        "".join(f"word{i}{' 1.5' * 100}\n" for i in range(5000)) + "great" + " 1" * 100
    )
    tracemalloc.start()
    try:
        sentiment140([path], vectors=vectors)
        assert tracemalloc.get_traced_memory()[1] < 500_000  # all of them take two million bytes
    finally:
        tracemalloc.stop()


def test_odd_words_of_real_vectors_are_no_error(tmp_path: Path) -> None:
    path, vectors = official(tmp_path / "t.csv"), tmp_path / "glove.txt"
    vectors.write_bytes("\x85 1 2\n\u2028 1 2\nday 3 4\nday 5 6\r\n".encode() + b"\xff\xfe 1 2\n")
    assert sentiment140([path], vectors=vectors).x[1].tolist() == [3.0, 4.0]


BAD_VECTORS = {
    "short": (
        "great 1 2\nday 1\n",
        r"v\.txt: line 2: has 1 numbers.*expected 2.*use a GloVe",
    ),
    "long": ("great 1 2\nelse 1 2 3\n", "line 2: has 3 numbers after the word, expected 2"),
    "no numbers": ("great\nday\n", "line 1: has 0 numbers after the word, expected one or more"),
    "blank line": ("great 1 2\n\nday 1 2\n", "line 2: has 0 numbers"),
    "text": (
        "great 1 2\nday 1 x\n",
        "line 2: .*b'x'.*expected a word and its numbers",
    ),
    "two spaces": ("great 1 2\nday 1 \n", "line 2: could not convert"),
    "infinite": ("great 1 inf\n", "line 1: has a number that is not a finite float32"),
    "not a number": (
        "else 1 2\ngreat nan 2\n",
        "line 2: has a number that is not a finite float32",
    ),
    "too large": ("great 1e39 2\n", "line 1: has a number that is not a finite float32"),
    "nothing known": ("tree 1 2\n", "has none of the 15 words of the tweets"),
    "empty": ("", "has none of the 15 words"),
}


@pytest.mark.parametrize("case", BAD_VECTORS)
def test_wrong_vectors_name_the_file_and_the_line(case: str, tmp_path: Path) -> None:
    content, message = BAD_VECTORS[case]
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(InputError, match=message):
        sentiment140([official(tmp_path / "t.csv")], vectors=tmp_path / "v.txt")


def test_an_archive_must_have_one_text(tmp_path: Path) -> None:
    path = official(tmp_path / "t.csv")
    two = zipped(tmp_path / "two.zip", glove25=GLOVE, glove50=GLOVE)
    with pytest.raises(
        InputError,
        match=r"two\.zip: .*one \.txt or \.csv file.*got glove25\.txt, glove50\.txt",
    ):
        sentiment140([path], vectors=two)
    with pytest.raises(InputError, match=r"got none: unpack it and name the one to use"):
        sentiment140([zipped(tmp_path / "none.zip")])
    with pytest.raises(
        InputError, match=r"cannot read .*absent\.txt: No such file.*check the name"
    ):
        sentiment140([path], vectors=tmp_path / "absent.txt")


LINE = '"0","1","date","NO_QUERY","bob","well"\n'
HEAD = "polarity,id,date,query,user,text\n"
BAD_TWEETS = {
    "few cells": (
        LINE + '"0","1"\n',
        r"t\.csv: line 2: has 2 cells.*'0'.*expected 6, polarity,id,date",
    ),
    "many cells": (HEAD + "0,1,date,NO_QUERY,bob,well,well\n", "line 2: has 7 cells"),
    "polarity": (
        LINE * 2 + LINE.replace('"0"', '"3"'),
        "line 3: has 6 cells, the first '3'.*polarity of 0, 2 or 4",
    ),
    "other header": ("target,ids,date,flag,user,text\n", "line 1: has 6 cells, the first 'target'"),
    "other order": (
        "polarity,user,text,id,date,query\n",
        "line 1: has 6 cells, the first 'polarity'",
    ),
    "second header": (HEAD + HEAD, "line 2: has 6 cells, the first 'polarity'"),
    "lines in quotes": (LINE.replace("well", "a\n\nb") + '"0"\n', "line 4: has 1 cells"),
    "open quotes": (
        LINE + LINE[:-3],
        r"t\.csv: .*quotes.*last row.*cut short",
    ),
    "one endless cell": (LINE + '"' + "x\n" * 70_000, "line 2: is not CSV .*field limit"),
    "bare return": (HEAD + "0,1,date,NO_QUERY,bob,a\rb\n", "line 2: is not CSV"),
    "neutral only": (LINE.replace('"0"', '"2"'), "has no tweet of polarity 0 or 4"),
    "header only": (HEAD, "has no tweet"),
    "empty": ("", "has no tweet"),
}


@pytest.mark.parametrize("case", BAD_TWEETS)
def test_wrong_tweets_name_the_file_and_the_line(case: str, tmp_path: Path) -> None:
    content, message = BAD_TWEETS[case]
    (tmp_path / "t.csv").write_bytes(content.encode())
    with pytest.raises(InputError, match=message):
        sentiment140([tmp_path / "t.csv"])


def test_below_a_header_the_text_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        (HEAD + "0,1,date,NO_QUERY,bob,well\n0,1,date,NO_QUERY,bob,schön\n").encode("latin-1")
    )
    with pytest.raises(InputError, match=r"t\.csv: line 3: .*save the file as UTF-8"):
        sentiment140([path])


def test_blank_lines_and_a_missing_last_newline_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(LINE + "\n" + LINE.rstrip())
    assert len(sentiment140([path]).x) == 2
    path.write_text(LINE + "\n\n")
    assert len(sentiment140([path]).x) == 1


def packed(kind: str, data: bytes) -> bytes:
    if kind == "gzip":
        return gzip.compress(data)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", data)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["gzip", "zip"])
def test_a_damaged_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    data = packed(kind, official(tmp_path / "plain.csv").read_bytes())
    path, numbers = tmp_path / "t.csv", np.random.default_rng(0)
    path.write_bytes(data)
    assert len(sentiment140([path]).x) == 3
    for keep in (4, 5, 12, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:keep])
        with pytest.raises(
            InputError,
            match=rf"t\.csv: .*{kind}.*cut short.*download it",
        ):
            sentiment140([path])
    failed = 0
    for place in numbers.integers(2, len(data), 100):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            sentiment140([path])  # a flipped bit in a time stamp does no harm
        except InputError as error:
            failed += str(path) in str(error)
    assert failed > 50


@needs_data
def test_the_real_play_in_its_own_memory() -> None:
    path = Path(os.environ["FEDSSO_DATA"]) / "tinyshakespeare.txt"
    tracemalloc.start()
    try:
        pool = shakespeare([path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pool.x.shape == (21870, 50, 65)
    assert peak < 2 * pool.x.numel()
    assert int(pool.y.max()) == 64
    assert pool.group is not None
    assert {"First Citizen", "ROMEO", "GLOUCESTER"} <= set(pool.group)
    assert len(set(pool.group)) == 300
    text = path.read_text()
    assert decoded(Pool(pool.x[777:778], pool.y[777:778]), sorted(set(text))) == [
        text[777 * 51 : 778 * 51]
    ]


@needs_data
def test_the_real_tweets_are_read_in_a_second() -> None:
    path = Path(os.environ["FEDSSO_DATA"]) / "sentiment140_10k.csv.gz"
    start = time.process_time()
    pool = sentiment140([path])
    assert time.process_time() - start < 1
    assert pool.x.shape == (10001, 1024)
    assert pool.y.bincount().tolist() == [5005, 4996]
    assert pool.notes == ()
    assert pool.group is not None
    assert len(set(pool.group)) == 9681
